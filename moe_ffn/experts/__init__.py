"""WHAT: E parallel MLPs with stacked weights."""
