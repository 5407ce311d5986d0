// Collectives between ranks of one machine: the memory that they share, and the barrier in it. How
// the data moves is in slots.c and direct.c.
#include "shared.h"
#include "clock.h"
#include "error.h"
#include <fcntl.h>
#include <linux/futex.h>
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum {
    // Looks at the other ranks before a rank sleeps. One that has nothing else to do looks for some
    // 50 us, which is what falling asleep and being woken would take.
    SPINS = 30000,
    SPINS_BESIDE_COMPUTATION = 2000,
    DIRECT_BYTES = 1 << 16, // below this, slots are faster
};

// ---- barrier -----------------------------------------------------------------------------------

static bool all_arrived(const struct shared *s) {
    for (int r = 0; r < s->group->size; r++) {
        if (atomic_load(&s->ranks[r].arrivals) < s->barriers) {
            return false;
        }
    }
    return true;
}

static void late(const struct shared *s, const struct call *call) {
    bool *entered = calloc((size_t)s->group->size, sizeof *entered);
    CHECK(entered != NULL);
    for (int r = 0; r < s->group->size; r++) {
        entered[r] = atomic_load(&s->ranks[r].arrivals) >= s->barriers;
    }
    report_late(call, entered);
}

// Sleeps until somebody arrives, or the time is over. A futex and no mutex: a rank that is stopped
// must not take a lock with it. Source: futex(2).
static void sleep_until_arrival(struct shared *s, unsigned arrivals, double seconds) {
    struct timespec limit = {
        .tv_sec = (time_t)seconds,
        .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9),
    };
    syscall(SYS_futex, &s->header->arrivals, FUTEX_WAIT, arrivals, &limit, NULL, 0);
}

static void barrier_sleep(struct shared *s, const struct call *call) {
    double begin_s = clock_s();
    atomic_fetch_add(&s->header->sleepers, 1);
    for (;;) {
        unsigned arrivals = atomic_load(&s->header->arrivals);
        double left = fmin(time_left_s(begin_s), 60);
        if (all_arrived(s)) {
            break;
        }
        if (left <= 0) {
            late(s, call);
        }
        sleep_until_arrival(s, arrivals, left);
    }
    atomic_fetch_sub(&s->header->sleepers, 1);
}

void shared_barrier(struct shared *s, const struct call *call) {
    s->barriers++;
    atomic_store(&s->ranks[s->group->rank].arrivals, s->barriers);
    atomic_fetch_add(&s->header->arrivals, 1);
    if (atomic_load(&s->header->sleepers) > 0) {
        syscall(SYS_futex, &s->header->arrivals, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
    }
    int spins = stream_is_thread ? SPINS_BESIDE_COMPUTATION : SPINS;
    for (int i = 0; i < spins && s->cores_suffice; i++) {
        if (all_arrived(s)) {
            return;
        }
    }
    barrier_sleep(s, call);
}

// ---- a call
// ---------------------------------------------------------------------------------------

// All ranks look at the signatures of all.
static void check(struct shared *s, const struct call *call) {
    int n = s->group->size;
    struct signature signatures[n];
    s->ranks[s->group->rank].signature = signature_of(call);
    shared_barrier(s, call);
    for (int r = 0; r < n; r++) {
        signatures[r] = s->ranks[r].signature;
    }
    signatures_compare(s->group, signatures);
    shared_barrier(s, call); // nobody writes the next one before all have read
}

void shared_run(struct shared *s, const struct call *call) {
    if (comm_mpi_config.check) {
        check(s, call);
    }
    if (call->count == 0) {
        return;
    }
    size_t parts = call->kind == COMM_ALL_REDUCE || call->kind == COMM_BROADCAST
                       ? 1
                       : (size_t)call->group->size;
    bool small = call->count * parts * dtype_size(call->dtype) < DIRECT_BYTES;
    if (s->direct && !small) {
        direct_run(s, call);
    } else {
        slots_run(s, call);
    }
}

// ---- the memory --------------------------------------------------------------------------------

static size_t round_up(size_t bytes) {
    return (bytes + 4095) / 4096 * 4096;
}

static size_t slots_offset(int n) {
    return round_up(sizeof(struct shared_header) + CACHE_LINE_BYTES +
                    (size_t)n * sizeof(struct shared_rank));
}

// Creates the file in memory; false if there is no room for it.
static bool create(const char *name, size_t bytes) {
    int file = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (file < 0) {
        return false;
    }
    // A file with holes would end us with SIGBUS later, when there is no room.
    bool whole = posix_fallocate(file, 0, (off_t)bytes) == 0;
    close(file);
    if (!whole) {
        shm_unlink(name);
    }
    return whole;
}

static void *map(const char *name, size_t bytes) {
    int file = shm_open(name, O_RDWR, 0);
    if (file < 0) {
        return MAP_FAILED;
    }
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    return memory;
}

// Rank 0 creates, all map, rank 0 removes the name: nothing is left behind, however the job ends.
static void *map_together(const struct comm_group *g, size_t bytes) {
    static int number;
    char name[64];
    snprintf(name, sizeof name, "/shard-%d-%d", (int)getpid(), number++);
    int created = g->rank == 0 && create(name, bytes);
    MPI_Bcast(&created, 1, MPI_INT, 0, g->mpi);
    MPI_Bcast(name, sizeof name, MPI_CHAR, 0, g->mpi);
    void *memory = created ? map(name, bytes) : MAP_FAILED;
    int mapped = memory != MAP_FAILED;
    int all_mapped = 0;
    MPI_Allreduce(&mapped, &all_mapped, 1, MPI_INT, MPI_MIN, g->mpi);
    if (created && g->rank == 0) {
        shm_unlink(name);
    }
    if (mapped && !all_mapped) {
        munmap(memory, bytes);
    }
    return all_mapped ? memory : NULL;
}

struct shared *shared_open(const struct comm_group *g) {
    size_t bytes = slots_offset(g->size) + ((size_t)g->size * 2 + 2) * SLOT_BYTES;
    char *memory = map_together(g, bytes);
    if (memory == NULL) {
        if (g->rank == 0) {
            error_warning(
                "no room for %zu KiB in /dev/shm, so the ranks exchange messages, which is "
                "slower",
                bytes / 1024);
        }
        return NULL;
    }
    struct shared *s = calloc(1, sizeof *s);
    CHECK(s != NULL);
    s->group = g;
    s->memory = memory;
    s->bytes = bytes;
    s->header = (struct shared_header *)memory;
    s->ranks =
        (struct shared_rank *)(memory + (sizeof(struct shared_header) + CACHE_LINE_BYTES - 1) /
                                            CACHE_LINE_BYTES * CACHE_LINE_BYTES);
    s->slots = memory + slots_offset(g->size);
    s->sums = s->slots + (size_t)g->size * 2 * SLOT_BYTES;
    s->cores_suffice = g->size <= sysconf(_SC_NPROCESSORS_ONLN);
    s->direct = direct_possible(s);
    return s;
}

void shared_close(struct shared *s) {
    munmap(s->memory, s->bytes);
    free(s);
}
