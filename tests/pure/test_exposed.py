"""What no computation hides, read off a schedule."""

from shardwright.schedule.check import Exposed, exposed
from shardwright.schedule.schedule import Phase, Schedule

STEP = """
forward
  F+ 2 : unshard 2, unshard 0, wait 2
  F+ 0 : unshard 1, wait 0
  F- 0 : reshard 0
  F+ 1 : wait 1
  F- 1
  F- 2
backward
  B+ 2
  B+ 1
  G  1 : reduce 1
  B- 1 : reshard 1
  B+ 0 : unshard 0, wait 0
  G  0 : wait-reduce 1, hold 0
  B- 0 : reshard 0
  G  2 : reduce 0+2
  E  : wait-reduce 0+2, reshard 2
"""


def test_a_gather_waited_for_where_it_is_issued_and_a_reduction_behind_the_last_backward_are_exposed():
    assert exposed(Schedule.parse(STEP)) == (
        Exposed(2, Phase.FORWARD),
        Exposed(0, Phase.BACKWARD),
        Exposed(0, Phase.BACKWARD, reduces=True),
        Exposed(2, Phase.BACKWARD, reduces=True),
    )


def test_what_is_issued_while_another_group_computes_is_not():
    hidden = STEP.replace("unshard 0, wait 0", "wait 0").replace("reshard 1", "reshard 1, unshard 0")
    assert Exposed(0, Phase.BACKWARD) not in exposed(Schedule.parse(hidden))
    early = STEP.replace("unshard 0, wait 0\n  G  0", "reduce 2, unshard 0, wait 0\n  G  0")
    assert exposed(Schedule.parse(early)) == exposed(Schedule.parse(STEP))


def test_before_a_step_nothing_is_known():
    assert exposed(Schedule()) == ()
