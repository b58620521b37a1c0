"""WHO: which token goes to which expert, with what weight; one file per router."""
