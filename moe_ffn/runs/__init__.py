"""Runs and their folders: options, checks before training, files, reading and resuming.

Before     config.py (the options), budget.py (cost), validate.py, memory.py, planner.py,
           custom_parts.py, custom_code.py
Start      assemble.py (model, data, Trainer), identity.py (what a resumed run must share)
Folder     folder.py (names and lock), json_files.py, rows.py (metrics)
Training   train/, which starts from weights/ and ends with a page of report/
After      reader.py (`load_run`), resume.py, texts.py (texts to evaluate on)
"""
