"""Typed options, read from YAML and validated; a mistake is reported in one sentence.

base.py         `Config`, and `TaggedConfig` for families whose `type:` picks the class
errors.py       `ConfigError`, `Unsupported`, and the texts of messages
yaml_files.py   YAML files and `--key value`, merged
option_tree.py  all options with their defaults, as `--help` shows them
import_path.py  classes from a user's file, `type: my_file.py:MyConfig`
trust.py        rejects custom code that the user has not trusted
sizes.py        hidden widths, and counts of parameters and FLOPs
lazy.py         package attributes that are imported on first use
environment.py  variables that torchrun, SLURM and Lightning set for each process
"""
