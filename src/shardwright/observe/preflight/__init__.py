"""Whether a job can train where it was started: the ranks find out, and the first one judges and prints.

findings.py  what is found out        host.py   a rank at home        links.py  a rank about the others
judge.py     what is wrong with it    page.py   what a person reads   ranks.py  who says what, and when
"""
