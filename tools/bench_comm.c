// The collectives of common/comm.h beside Open MPI's own, and beside plain copying.
//
// All-reduce, reduce-scatter and all-gather of F32, size by size. In every round ours and Open
// MPI's run one right after the other, since the speed of a shared machine changes from second to
// second; all ranks copy memory in the same round, too. A time is the slowest rank's; the table has
// the medians of the rounds, and a ratio is the median of the rounds' ratios.
//
// Sizes and bandwidths are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md there): the size is
// that of the whole buffer, and "bus" bandwidth is what would pass each link of a ring,
//
//     size / time * 2 (n - 1) / n     all-reduce
//     size / time * (n - 1) / n       reduce-scatter, all-gather
//
// so that it can be compared with the speed of the hardware, here of memcpy(): bytes copied a
// second on each rank, by all ranks at once, from and to buffers of the same size.
//
// Run: mpirun -n 2 build/PRESET/tools/bench_comm [--rounds N] [--most MIB] [--json FILE]
//      ./run bench comm
#include "common/args.h"
#include "common/comm.h"
#include "common/device.h"
#include "common/error.h"
#include "common/tensor.h"
#include <errno.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    ROUNDS_MAX = 1000,
    WARM_UP = 2, // rounds that do not count
    REPEATS_MAX = 64, // calls in a round
};

static const size_t SIZES[] = {64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20};

enum { SIZE_COUNT = sizeof SIZES / sizeof *SIZES };

struct settings {
    int64_t rounds;
    int64_t most_mib;
    bool messages;
    const char *json;
};

// What all measurements share. Buffers of MPI are memory of the host, like those of a CPU's
// tensors.
struct bench {
    struct comm c;
    int64_t rounds;
    FILE *json; // or NULL; rank 0's
    struct tensor whole; // (1, largest size)
    struct tensor part; // (1, largest size / c.size)
    float *whole_host; // as whole
    float *part_host; // as part
    float *copy_host; // as whole
};

// ---- what is measured --------------------------------------------------------------------------

// One call, ours or Open MPI's, on a buffer of `count` elements that c.size divides.
typedef void call(const struct bench *b, size_t count);

static size_t part_count(const struct bench *b, size_t count) {
    return count / (size_t)b->c.size;
}

static void our_all_reduce(const struct bench *b, size_t count) {
    comm_wait(comm_all_reduce(b->c, tensor_view(b->whole, 0, 1, count), COMM_SUM));
}

static void our_reduce_scatter(const struct bench *b, size_t count) {
    struct tensor part = tensor_view(b->part, 0, 1, part_count(b, count));
    comm_wait(comm_reduce_scatter(b->c, part, tensor_view(b->whole, 0, 1, count)));
}

static void our_all_gather(const struct bench *b, size_t count) {
    struct tensor part = tensor_view(b->part, 0, 1, part_count(b, count));
    comm_wait(comm_all_gather(b->c, tensor_view(b->whole, 0, 1, count), part));
}

static void mpi_all_reduce(const struct bench *b, size_t count) {
    MPI_Allreduce(MPI_IN_PLACE, b->whole_host, (int)count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void mpi_reduce_scatter(const struct bench *b, size_t count) {
    MPI_Reduce_scatter_block(b->whole_host, b->part_host, (int)part_count(b, count), MPI_FLOAT,
                             MPI_SUM, MPI_COMM_WORLD);
}

static void mpi_all_gather(const struct bench *b, size_t count) {
    int part = (int)part_count(b, count);
    MPI_Allgather(b->part_host, part, MPI_FLOAT, b->whole_host, part, MPI_FLOAT, MPI_COMM_WORLD);
}

static void copy(const struct bench *b, size_t count) {
    memcpy(b->copy_host, b->whole_host, count * sizeof(float));
    __asm__ volatile("" ::"r"(b->copy_host) : "memory"); // somebody might read it
}

static const struct {
    const char *name;
    call *ours;
    call *mpi;
    int passes; // how often a ring sends (n - 1) / n of the buffer
} COLLECTIVES[] = {
    {"all-reduce", our_all_reduce, mpi_all_reduce, 2},
    {"reduce-scatter", our_reduce_scatter, mpi_reduce_scatter, 1},
    {"all-gather", our_all_gather, mpi_all_gather, 1},
};

enum { COLLECTIVE_COUNT = sizeof COLLECTIVES / sizeof *COLLECTIVES };

// ---- measuring ---------------------------------------------------------------------------------

// Seconds of one call on the slowest rank. Nothing of ours is in flight when MPI is called, here
// and in the calls: only one thread may call MPI at a time.
static double time_calls(const struct bench *b, call *f, size_t count, int repeats) {
    double slowest = 0;
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    for (int i = 0; i < repeats; i++) {
        f(b, count);
    }
    double took = (MPI_Wtime() - start) / repeats;
    MPI_Allreduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return slowest;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int64_t count) {
    qsort(x, (size_t)count, sizeof *x, compare);
    return (x[(count - 1) / 2] + x[count / 2]) / 2;
}

// Medians of the rounds.
struct result {
    double ours_s;
    double mpi_s;
    double copy_s;
    double ratio; // Open MPI's time / ours
    double share; // our bandwidth / that of memcpy()
};

// As many calls in a round as move about 64 MiB.
static int repeats_for(size_t bytes) {
    size_t repeats = ((size_t)64 << 20) / bytes;
    return repeats < 1 ? 1 : repeats > REPEATS_MAX ? REPEATS_MAX : (int)repeats;
}

// Bytes that pass a link of a ring in one call.
static double bus_bytes(const struct bench *b, int which, size_t bytes) {
    double n = b->c.size;
    return (double)bytes * COLLECTIVES[which].passes * (n - 1) / n;
}

static struct result measure(const struct bench *b, int which, size_t bytes) {
    double ours[ROUNDS_MAX], mpi[ROUNDS_MAX], copies[ROUNDS_MAX];
    double ratio[ROUNDS_MAX], share[ROUNDS_MAX];
    size_t count = bytes / sizeof(float);
    int repeats = repeats_for(bytes);
    for (int64_t i = -WARM_UP; i < b->rounds; i++) {
        int64_t round = i < 0 ? 0 : i;
        ours[round] = time_calls(b, COLLECTIVES[which].ours, count, repeats);
        mpi[round] = time_calls(b, COLLECTIVES[which].mpi, count, repeats);
        copies[round] = time_calls(b, copy, count, repeats);
        ratio[round] = mpi[round] / ours[round];
        share[round] = bus_bytes(b, which, bytes) / ours[round] * copies[round] / (double)bytes;
    }
    return (struct result){
        .ours_s = median(ours, b->rounds),
        .mpi_s = median(mpi, b->rounds),
        .copy_s = median(copies, b->rounds),
        .ratio = median(ratio, b->rounds),
        .share = median(share, b->rounds),
    };
}

// ---- table -------------------------------------------------------------------------------------

static void size_text(char *text, size_t text_size, size_t bytes) {
    if (bytes < 1 << 20) {
        snprintf(text, text_size, "%zu KiB", bytes >> 10);
    } else {
        snprintf(text, text_size, "%zu MiB", bytes >> 20);
    }
}

static void print_row(const struct bench *b, int which, size_t bytes, const struct result *r) {
    char size[32];
    double moved = bus_bytes(b, which, bytes) * 1e-9;
    size_text(size, sizeof size, bytes);
    printf("%-14s %8s %9.3f %9.3f %7.2f %7.2f %6.2f %7.2f %5.2f\n", COLLECTIVES[which].name, size,
           r->ours_s * 1e3, r->mpi_s * 1e3, moved / r->ours_s, moved / r->mpi_s, r->ratio,
           (double)bytes * 1e-9 / r->copy_s, r->share);
    fflush(stdout);
    if (b->json != NULL) {
        fprintf(b->json,
                "{\"collective\": \"%s\", \"ranks\": %d, \"bytes\": %zu, \"ms\": %.6f, "
                "\"mpi_ms\": %.6f, \"gbps\": %.4f, \"mpi_gbps\": %.4f, \"ratio\": %.4f, "
                "\"memcpy_gbps\": %.4f, \"share\": %.4f}\n",
                COLLECTIVES[which].name, b->c.size, bytes, r->ours_s * 1e3, r->mpi_s * 1e3,
                moved / r->ours_s, moved / r->mpi_s, r->ratio, (double)bytes * 1e-9 / r->copy_s,
                r->share);
    }
}

static void print_head(const struct bench *b, const struct settings *s) {
    printf("%d ranks, F32, transport %s%s, %lld rounds; bus bandwidth in GB/s (10^9 bytes)\n\n",
           b->c.size, comm_transport(), s->messages ? " (messages)" : "", (long long)s->rounds);
    printf("%-14s %8s %9s %9s %7s %7s %6s %7s %5s\n", "", "", "ours", "Open MPI", "ours", "Open",
           "", "memcpy", "");
    printf("%-14s %8s %9s %9s %7s %7s %6s %7s %5s\n", "", "size", "ms", "ms", "GB/s", "MPI",
           "ratio", "GB/s", "share");
}

// All collectives and sizes. From 4 MiB on ours should not be slower.
static void run_all(const struct bench *b, const struct settings *s) {
    const size_t large = 4 << 20;
    double worst = 1e9;
    if (b->c.rank == 0) {
        print_head(b, s);
    }
    for (int which = 0; which < COLLECTIVE_COUNT; which++) {
        for (int i = 0; i < SIZE_COUNT && SIZES[i] <= (size_t)s->most_mib << 20; i++) {
            size_t part = SIZES[i] / sizeof(float) / (size_t)b->c.size;
            size_t bytes = part * (size_t)b->c.size * sizeof(float);
            struct result r = measure(b, which, bytes);
            worst = SIZES[i] >= large && r.ratio < worst ? r.ratio : worst;
            if (b->c.rank == 0) {
                print_row(b, which, bytes, &r);
            }
        }
    }
    if (b->c.rank == 0 && worst < 1e9) {
        printf("\nSmallest ratio at 4 MiB and more: %.2f (goal 1.00: %s)\n", worst,
               worst >= 1 ? "reached" : "not reached");
    }
}

// ---- main --------------------------------------------------------------------------------------

// Zeros: sums of sums would become infinite.
static struct tensor zeros(size_t count, const float *zeros_host) {
    struct tensor t = tensor_alloc(1, count, DTYPE_F32, MEM_COMM);
    device_upload(t, zeros_host);
    return t;
}

// Memory in which every page exists.
static float *host_zeros(size_t count) {
    float *x = aligned_alloc(64, (count * sizeof *x + 63) / 64 * 64);
    CHECK(x != NULL);
    memset(x, 0, count * sizeof *x);
    return x;
}

static void bench_open(struct bench *b, const struct settings *s) {
    size_t most = 0;
    for (int i = 0; i < SIZE_COUNT && SIZES[i] <= (size_t)s->most_mib << 20; i++) {
        most = SIZES[i] / sizeof(float);
    }
    b->rounds = s->rounds;
    b->whole_host = host_zeros(most);
    b->copy_host = host_zeros(most);
    b->part_host = host_zeros(part_count(b, most));
    b->whole = zeros(most, b->whole_host);
    b->part = zeros(part_count(b, most), b->part_host);
}

static void bench_close(struct bench *b) {
    tensor_free(&b->part);
    tensor_free(&b->whole);
    free(b->part_host);
    free(b->copy_host);
    free(b->whole_host);
}

static void parse(struct settings *s, int argc, char **argv) {
    const struct arg table[] = {
        {.name = "--rounds",
         .kind = ARG_INT,
         .value = &s->rounds,
         .min = 1,
         .max = ROUNDS_MAX,
         .unit = "N",
         .help = "how often everything is measured",
         .group = "bench_comm"},
        {.name = "--most",
         .kind = ARG_INT,
         .value = &s->most_mib,
         .min = 1,
         .max = 64,
         .unit = "MIB",
         .help = "largest buffer"},
        {.name = "--messages",
         .kind = ARG_FLAG,
         .value = &s->messages,
         .help = "MPI messages instead of shared memory"},
        {.name = "--json",
         .kind = ARG_STRING,
         .value = &s->json,
         .unit = "FILE",
         .help = "write a JSON object a row"},
        {.kind = ARG_NONE},
    };
    const struct arg *const tables[] = {table};
    args_parse(argc, argv, "our collectives beside Open MPI's", tables, 1);
}

int main(int argc, char **argv) {
    struct settings s = {
        .rounds = 9,
        .most_mib = 64,
    };
    struct bench b = {.c = comm_init()};
    parse(&s, argc, argv);
    if (b.c.size < 2) {
        error_user("bench_comm measures what ranks exchange, and there is one rank; start it with "
                   "mpirun -n 2");
    }
    if (s.json != NULL && b.c.rank == 0 && (b.json = fopen(s.json, "w")) == NULL) {
        error_user("--json %s: %s; name a file that can be written", s.json, strerror(errno));
    }
    comm_start(b.c, &(struct comm_config){.messages = s.messages});
    device_init(1, comm_local_size());
    bench_open(&b, &s);
    run_all(&b, &s);
    bench_close(&b);
    if (b.json != NULL) {
        fclose(b.json);
    }
    comm_finish();
    return 0;
}
