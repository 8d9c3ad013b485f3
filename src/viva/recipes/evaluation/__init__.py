"""``viva eval``: any policy on any test set, alone or against another one."""
