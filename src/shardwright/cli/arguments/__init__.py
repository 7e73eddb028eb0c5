"""The arguments of the verbs whose work needs torch, and what is looked at before it is imported."""
