"""``make prove-gpu``: what can only be shown where accelerators are, in one command and on one page."""
