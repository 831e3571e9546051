// Which rank a process is, from the variables that its launcher sets: every launcher, variables
// that are not set, and variables that contradict each other.
#include "../ranks/launch.h"
#include "fixture.h"

// Sets the environment to "NAME=value NAME=value".
static void set_environment(const char *text) {
    clearenv();
    FREED char *copy = strdup_or_die(text);
    char *state;
    for (char *word = strtok_r(copy, " ", &state); word != NULL;
         word = strtok_r(NULL, " ", &state)) {
        char *equals = strchr(word, '=');
        *equals = '\0';
        setenv(word, equals + 1, 1);
    }
}

#define OMPI(rank, size, local, local_size)                      \
    "OMPI_COMM_WORLD_RANK=" #rank " OMPI_COMM_WORLD_SIZE=" #size \
    " OMPI_COMM_WORLD_LOCAL_RANK=" #local " OMPI_COMM_WORLD_LOCAL_SIZE=" #local_size " "
#define TORCH(rank, size, local, local_size) \
    "RANK=" #rank " WORLD_SIZE=" #size " LOCAL_RANK=" #local " LOCAL_WORLD_SIZE=" #local_size " "
#define HYDRA(rank, size, local, local_size)                        \
    "PMI_RANK=" #rank " PMI_SIZE=" #size " MPI_LOCALRANKID=" #local \
    " MPI_LOCALNRANKS=" #local_size " "
#define SLURM(rank, size, local)                                                  \
    "SLURM_PROCID=" #rank " SLURM_STEP_NUM_TASKS=" #size " SLURM_LOCALID=" #local \
    " SLURM_JOB_ID=1234567 "
#define MASTER "MASTER_ADDR=node1 MASTER_PORT=1234 "

// What a process makes of its variables and options: where it connects to the others and which rank
// it is, or what does not fit.
TEST(launchers_are_understood) {
    static const struct {
        const char *environment, *options, *expected;
    } rows[] = {
        {"", "", "at 127.0.0.1 port 0, rank 0 of 1, 0 of 1 here."},
        {"", "--gpus 8", "at 127.0.0.1 port 0, rank 0 of 8, 0 of 8 here, starts."},
        {MASTER, "--gpus 4",
         "at 127.0.0.1 port 0, rank 0 of 4, 0 of 4 here, starts."}, // unused: there is one machine
        {MASTER "NNODES=3 NODE_RANK=2", "--gpus 4",
         "at node1 port 1234, rank 8 of 12, 0 of 4 here, starts."},
        {MASTER "NNODES=2 NODE_RANK=1", "",
         "at node1 port 1234, rank 1 of 2, 0 of 1 here, starts."},
        {TORCH(5, 8, 1, 4) MASTER, "", "at node1 port 1234, rank 5 of 8, 1 of 4 here."},
        {TORCH(5, 8, 1, 4) MASTER, "--gpus 4",
         "at node1 port 1234, rank 5 of 8, 1 of 4 here."}, // as we start them
        {TORCH(1, 2, 1, 2), "", "at 127.0.0.1 port 29500, rank 1 of 2, 1 of 2 here."},
        {TORCH(1, 2, 0, 1) "MASTER_ADDR=[fd00::2]", "",
         "at fd00::2 port 29500, rank 1 of 2, 0 of 1 here."},
        {TORCH(0, 1, 0, 1) MASTER, "", "at 127.0.0.1 port 0, rank 0 of 1, 0 of 1 here."},
        {TORCH(0, 1, 0, 1), "--gpus 2", "at 127.0.0.1 port 0, rank 0 of 2, 0 of 2 here, starts."},
        // the --gpus of an earlier run give way
        {"", "--config kept.txt", "at 127.0.0.1 port 0, rank 0 of 8, 0 of 8 here, starts."},
        {TORCH(1, 4, 1, 4) "MASTER_ADDR=x", "--config kept.txt",
         "at x port 29500, rank 1 of 4, 1 of 4 here."},
        {TORCH(0, 1, 0, 1), "--config kept.txt", "at 127.0.0.1 port 0, rank 0 of 1, 0 of 1 here."},
        {"WORLD_SIZE=1", "", "at 127.0.0.1 port 0, rank 0 of 1, 0 of 1 here."},
        {"RANK=1 WORLD_SIZE=2 LOCAL_RANK=0 " MASTER, "",
         "at node1 port 1234, rank 1 of 2, 0 of 0 here."},
        {TORCH(5, 8, 1, 4) MASTER "TORCHELASTIC_USE_AGENT_STORE=True", "",
         "at node1 port 1236, rank 5 of 8, 1 of 4 here, elsewhere."},
        {TORCH(5, 8, 1, 4) "MASTER_ADDR=x MASTER_PORT=65534 TORCHELASTIC_USE_AGENT_STORE=True", "",
         "at x port 65532, rank 5 of 8, 1 of 4 here, elsewhere."},
        {TORCH(5, 8, 1, 4) MASTER "TORCHELASTIC_USE_AGENT_STORE=False", "",
         "at node1 port 1234, rank 5 of 8, 1 of 4 here."},
        {"RANK= WORLD_SIZE=", "", "at 127.0.0.1 port 0, rank 0 of 1, 0 of 1 here."},
        {OMPI(3, 4, 3, 4), "", "at 127.0.0.1 port 29500, rank 3 of 4, 3 of 4 here."},
        {OMPI(3, 4, 1, 2) MASTER, "", "at node1 port 1234, rank 3 of 4, 1 of 2 here."},
        {OMPI(3, 4, 3, 4) TORCH(1, 2, 1, 2), "",
         "at 127.0.0.1 port 29500, rank 1 of 2, 1 of 2 here."},
        {HYDRA(3, 4, 3, 4), "", "at 127.0.0.1 port 29500, rank 3 of 4, 3 of 4 here."},
        // mpiexec starts its proxies by srun, one a node
        {HYDRA(3, 4, 1, 2) SLURM(1, 2, 0) MASTER, "",
         "at node1 port 1234, rank 3 of 4, 1 of 2 here."},
        {HYDRA(0, 1, 0, 1), "--gpus 2", "at 127.0.0.1 port 0, rank 0 of 2, 0 of 2 here, starts."},
        {SLURM(2, 4, 0) "SLURM_STEP_NODELIST=n[3-5,8]", "",
         "at n3 port 27335, rank 2 of 4, 0 of 0 here."},
        {SLURM(1, 2, 1) "PMI_RANK=1 PMI_SIZE=2 " MASTER, "",
         "at node1 port 1234, rank 1 of 2, 1 of 0 here."}, // srun --mpi=pmi2
        {"PMI_RANK=1 PMI_SIZE=2 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=2", "",
         "at 127.0.0.1 port 29500, rank 1 of 2, 1 of 2 here."},
        {SLURM(2, 4, 0) "SLURM_STEP_NODELIST=n[3-5,8] " MASTER, "",
         "at node1 port 1234, rank 2 of 4, 0 of 0 here."},
        {SLURM(2, 7, 0) "SLURM_STEP_TASKS_PER_NODE=2(x3),1 " MASTER, "",
         "at node1 port 1234, rank 2 of 7, 0 of 2 here."},
        {SLURM(1, 2, 1) "SLURM_STEP_TASKS_PER_NODE=2", "",
         "at 127.0.0.1 port 27335, rank 1 of 2, 1 of 2 here."},
        {SLURM(0, 1, 0) "SLURM_STEP_NODELIST=n3", "--gpus 8",
         "at 127.0.0.1 port 0, rank 0 of 8, 0 of 8 here, starts."},
        // a batch script before it calls srun
        {"SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_LOCALID=0", "",
         "at 127.0.0.1 port 0, rank 0 of 1, 0 of 1 here."},
        {SLURM(0, 2, 0) "SLURM_STEP_NODELIST=n3", "", "at n3 port 27335, rank 0 of 2"},
        {SLURM(0, 2, 0) "SLURM_STEP_NODELIST=n3,n4", "", "at n3 port 27335, rank 0 of 2"},
        {SLURM(0, 2, 0) "SLURM_STEP_NODELIST=gpu-[007-012]", "",
         "at gpu-007 port 27335, rank 0 of 2"},
        {SLURM(0, 2, 0) "SLURM_STEP_NODELIST=gpu-[7,9]", "", "at gpu-7 port 27335, rank 0 of 2"},
        {SLURM(0, 2, 0) "SLURM_STEP_NODELIST=gpu[1-2]-ib,x", "",
         "at gpu1-ib port 27335, rank 0 of 2"},
        {SLURM(0, 2, 0) "SLURM_STEP_NODELIST=gpu[1-2]-ib[3-4]", "",
         "at gpu1-ib[3-4] port 27335, rank 0 of 2"}, // names with a second bracket are not expanded
        {SLURM(0, 2, 0) "SLURM_STEP_NODELIST=a[", "", "at a port 27335, rank 0 of 2"},
        {SLURM(0, 2, 0) "SLURM_STEP_NODELIST=[1-2]", "", "at 1 port 27335, rank 0 of 2"},
        {"WORLD_SIZE=4", "", "RANK, WORLD_SIZE and LOCAL_RANK say which of how many ranks this is"},
        {"RANK=0", "", "RANK, WORLD_SIZE and LOCAL_RANK say which"},
        {"RANK=0 WORLD_SIZE=2 " MASTER, "", "which GPU of its machine it takes: set all three"},
        {TORCH(4, 4, 0, 4), "", "RANK=4: must be a whole number from 0 to 3"},
        {TORCH(-1, 4, 0, 4), "", "RANK=-1: must be"},
        {TORCH(1x, 4, 0, 4), "", "RANK=1x: must be"},
        {TORCH(1, 0, 0, 4), "", "WORLD_SIZE=0: must be a whole number from 1 to 4096"},
        {TORCH(1, 99999999999, 0, 4), "", "WORLD_SIZE=99999999999: must be"},
        {TORCH(1, 4, 4, 4), "", "LOCAL_RANK=4: must be a whole number from 0 to 3"},
        {TORCH(1, 4, 0, 5), "", "LOCAL_WORLD_SIZE=5: must be a whole number from 1 to 4"},
        {TORCH(1, 4, 1, 2), "", "MASTER_ADDR is not set: 4 ranks"},
        {TORCH(1, 4, 1, 4) "MASTER_PORT=0", "", "MASTER_PORT=0: must be a whole number from 1 to"},
        {TORCH(1, 4, 1, 4) "MASTER_PORT=port", "", "MASTER_PORT=port: must be"},
        {TORCH(1, 4, 1, 4), "--gpus 2", "--gpus 2, but 4 ranks are started already (WORLD_SIZE=4)"},
        {"OMPI_COMM_WORLD_RANK=1", "",
         "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE and OMPI_COMM_WORLD_LOCAL_RANK"},
        {OMPI(1, 4, 1, 2), "", "MASTER_ADDR is not set"},
        {HYDRA(1, 4, 1, 2), "", "MASTER_ADDR is not set"},
        {"PMI_RANK=1 PMI_SIZE=2", "", "PMI_RANK, PMI_SIZE and PMI_LOCAL_RANK say which"},
        {SLURM(1, 4, 0), "", "MASTER_ADDR is not set"},
        {SLURM(4, 4, 0) MASTER, "", "SLURM_PROCID=4: must be"},
        {"NNODES=2", "--gpus 2", "NNODES=2 also needs NODE_RANK, MASTER_ADDR and MASTER_PORT"},
        {"NNODES=2 NODE_RANK=2", "--gpus 2", "NODE_RANK=2: must be a whole number from 0 to 1"},
        {"NNODES=2 NODE_RANK=0", "--gpus 2", "NNODES=2 also needs NODE_RANK, MASTER_ADDR and"},
        {"NNODES=2 NODE_RANK=0 MASTER_ADDR=x", "", "NNODES=2 also needs"},
        {"NNODES=4096 NODE_RANK=0 " MASTER, "--gpus 2",
         "NNODES=4096 and --gpus 2: more than 4096 ranks"},
    };
    text_write("kept.txt", "gpus 8\n");
    EACH (row, rows) {
        Options o = options_of(row->options);
        Ranks r;
        fail("%s", "");
        set_environment(row->environment);
        const char *text = error_text();
        if (ranks_read(&r, &o)) {
            CHECK_TEXT(error_text(), "");
            text = text_of("at %s port %d, rank %d of %d, %d of %d here%s%s", r.rendezvous.host,
                           r.rendezvous.port, r.group.rank, r.group.ranks, r.group.local_rank,
                           r.group.local_ranks, r.starts ? ", starts" : "",
                           r.rendezvous.elsewhere ? ", elsewhere" : "");
        }
        CHECK_CONTAINS(text_of("%s.", text), row->expected);
    }
}

// What the variables that identify a run give: ranks of one run have the same text and port;
// two runs differ in both.
TEST(runs_are_told_apart) {
    static const Says rows[] = {
        {SLURM(0, 2, 0), "SLURM_JOB_ID=1234567 "},
        {SLURM(1, 2, 1) "SLURM_STEP_ID=0", "SLURM_JOB_ID=1234567 SLURM_STEP_ID=0 "},
        {SLURM(1, 2, 1) "SLURM_STEP_ID=1 SLURM_ARRAY_JOB_ID=7",
         "SLURM_JOB_ID=1234567 SLURM_STEP_ID=1 "},
        {SLURM(1, 2, 1) "SLURM_STEP_ID=0 SLURM_RESTART_COUNT=2",
         "SLURM_JOB_ID=1234567 SLURM_STEP_ID=0 SLURM_RESTART_COUNT=2 "},
        {OMPI(0, 2, 0, 2) "PMIX_NAMESPACE=node-77@1", "PMIX_NAMESPACE=node-77@1 "},
        {OMPI(1, 2, 1, 2) "OMPI_MCA_ess_base_jobid=5", "OMPI_MCA_ess_base_jobid=5 "},
        {TORCH(1, 2, 1, 2) "TORCHELASTIC_RUN_ID=x", "TORCHELASTIC_RUN_ID=x "},
        {TORCH(1, 2, 1, 2) "TORCHELASTIC_RUN_ID=x LLM8_SECRET=s", "TORCHELASTIC_RUN_ID=x s"},
        {TORCH(1, 2, 1, 2) "LLM8_SECRET=0123456789abcdefFEDCBA9876543210",
         "0123456789abcdefFEDCBA9876543210"},
        {TORCH(1, 2, 1, 2), ""},
        // torchrun on each of two nodes: Slurm's numbers are not those of all ranks
        {TORCH(3, 4, 1, 2) SLURM(1, 2, 0) MASTER "SLURM_STEP_ID=3", ""},
    };
    int ports[COUNT(rows)];
    EACH (row, rows) {
        Options o = options_of("");
        Ranks r;
        set_environment(row->given);
        ranks_read(&r, &o); // Slurm's rows lack a host
        CHECK_TEXT(r.rendezvous.token, row->expected);
        ports[row - rows] = r.rendezvous.port;
        for (const Says *other = rows; other < row; other++) {
            bool same = strcmp(other->expected, row->expected) == 0;
            const char *both = text_of("%s%s", row->given, other->given);
            bool chosen = strstr(both, "MASTER") || strstr(both, "SECRET"); // which is in no port
            CHECK(chosen || same == (ports[row - rows] == ports[other - rows]));
        }
    }
}

TEST(ranks_take_gpus) {
    Group g = {.rank = 6, .ranks = 8, .local_rank = 2};
    int device;
    CHECK(ranks_device(&g, 4, &device));
    CHECK_EQUAL(device, 2);
    CHECK(ranks_device(&g, 1, &device)); // its launcher has hidden the others
    CHECK_EQUAL(device, 0);
    CHECK(!ranks_device(&g, 2, &device));
    CHECK_CONTAINS(error_text(), "rank 6 is number 2 on its machine, which has GPUs 0 to 1");
}
