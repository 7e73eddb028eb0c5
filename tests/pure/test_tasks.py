"""What a scheduler's variables make of a process: one rank of one run, or a refusal with the line to use."""

import pytest

from shardwright.errors import ConfigError
from shardwright.train.tasks import first_node, take_part

STEP = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "5"}
STEP |= {"SLURM_NODELIST": "gpu[08-09,12]", "SLURM_TASKS_PER_NODE": "2(x2),1"}


def rank_of(**environment):
    before = dict(environment)
    take_part(environment)
    return {key: value for key, value in environment.items() if key not in before}


@pytest.mark.parametrize(("rank", "local", "node", "near"), [(0, 0, 0, 2), (3, 1, 1, 2), (4, 0, 2, 1)])
def test_a_task_of_srun_is_one_rank_of_all_tasks(rank, local, node, near):
    place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
    of_rank = {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(near)}
    of_all = {"WORLD_SIZE": "5", "MASTER_ADDR": "gpu08", "MASTER_PORT": "12077"}
    assert rank_of(**STEP, **place) == of_rank | of_all


def test_a_task_with_devices_of_its_own_takes_the_first_that_it_sees():
    told = rank_of(**STEP, SLURM_PROCID="3", SLURM_LOCALID="1", SLURM_NODEID="1", SLURM_GPUS_PER_TASK="1")
    assert (told["RANK"], told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("3", "0", "1")


def test_where_rank_0_is_can_be_given():
    told = rank_of(**STEP, SLURM_PROCID="1", MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    assert not {"MASTER_ADDR", "MASTER_PORT"} & told.keys()


def test_steps_side_by_side_meet_at_other_ports():
    ports = {rank_of(**{**STEP, "SLURM_STEP_ID": str(i)}, SLURM_PROCID="0")["MASTER_PORT"] for i in range(20)}
    assert len(ports) == 20
    assert all(1024 < int(port) < 32768 for port in ports)


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967290"}, {"SLURM_STEP_ID": "4294967291"}])
def test_a_job_of_several_tasks_without_srun_is_refused_with_the_line(step):
    shell = {key: value for key, value in STEP.items() if key != "SLURM_STEP_ID"} | step
    with pytest.raises(ConfigError, match=r"5 tasks.*write srun shardwright train"):
        rank_of(**shell, SLURM_PROCID="0")


@pytest.mark.parametrize(
    "alone",
    [
        {},
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
        {"SLURM_NTASKS": "4"},  # salloc, on the login node
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        {**STEP, "SLURM_PROCID": "1", "RANK": "5", "WORLD_SIZE": "8"},  # of a torchrun of srun
    ],
)
def test_one_process_and_a_rank_of_torchrun_stay_what_they_are(alone):
    assert rank_of(**alone) == {}


OPEN_MPI = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in OPEN_MPI.items()}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("of_mpirun", "line"), [(OPEN_MPI, "-x MASTER_ADDR="), (HYDRA, "-genv MASTER_ADDR ")]
)
def test_a_process_of_mpirun_is_a_rank_where_it_is_told_where_rank_0_is(of_mpirun, line):
    inside_slurm = {**of_mpirun, **STEP, "SLURM_PROCID": "0"}  # of the daemon that has started it
    with pytest.raises(ConfigError, match=line):
        rank_of(**inside_slurm)
    told = rank_of(**inside_slurm, MASTER_ADDR="a", MASTER_PORT="1")
    assert told == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_processes_that_are_not_told_which_of_their_host_they_are_are_refused():
    with pytest.raises(ConfigError, match=r"one of 4 processes.*start one torchrun on each host"):
        rank_of(PMI_RANK="0", PMI_SIZE="4")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[1-4]", "n1"), ("n[007,9]-ib,m", "n007-ib"), ("r[1-2]n[3-4],x", "r1n3")],
)
def test_the_first_node_of_a_list(nodes, first):
    assert first_node(nodes) == first
