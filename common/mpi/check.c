// What finds mistakes: ranks that call different things, ranks that do not come, and a log of
// calls.
#include "clock.h"
#include "error.h"
#include "stop.h"
#include "transport.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    TEXT_BYTES = 160,
    OTHERS_S = 10, // mpirun needs three or four to end the job, more on a busy machine
};

// Seconds until the limit, counted from the begin of the call or from when this process was
// continued.
static double seconds_left(double begin_s) {
    double limit = comm_mpi_config.timeout_s;
    double passed = fmin(clock_s() - begin_s, stop_continued_s_ago());
    return limit > 0 ? limit - passed : INFINITY;
}

double time_left_s(double begin_s) {
    double left = seconds_left(begin_s);
    if (left <= 0) {
        usleep(500000); // continued just now, the process may not have taken SIGCONT yet
        left = seconds_left(begin_s);
    }
    return left;
}

void leave_it_to_others(void) {
    sleep(OTHERS_S);
}

static bool has_root(enum comm_kind kind) {
    return kind == COMM_BROADCAST || kind == COMM_SEND || kind == COMM_RECV;
}

// ---- signatures --------------------------------------------------------------------------------

struct signature signature_of(const struct call *call) {
    struct signature s;
    memset(&s, 0, sizeof s); // padding, too, is compared
    s.number = call->number;
    s.count = call->count;
    s.kind = call->kind;
    s.dtype = call->dtype;
    s.op = call->op;
    s.root = has_root(call->kind) ? call->peer : -1;
    return s;
}

// "all-reduce of 409600 x F32, sum (call 12)"
static void signature_text(char *text, const struct signature *s) {
    int length =
        snprintf(text, TEXT_BYTES, "%s of %llu x %s", comm_kind_name((enum comm_kind)s->kind),
                 (unsigned long long)s->count, dtype_name((enum dtype)s->dtype));
    if (s->kind == COMM_ALL_REDUCE || s->kind == COMM_REDUCE_SCATTER) {
        length += snprintf(text + length, TEXT_BYTES - (size_t)length, ", %s",
                           s->op == COMM_SUM ? "sum" : "max");
    }
    if (s->root >= 0) {
        bool point = s->kind == COMM_SEND || s->kind == COMM_RECV;
        length += snprintf(text + length, TEXT_BYTES - (size_t)length, ", %s %d",
                           point ? "peer" : "root", (int)s->root);
    }
    snprintf(text + length, TEXT_BYTES - (size_t)length, " (call %llu)",
             (unsigned long long)s->number);
}

void signatures_compare(const struct comm_group *g, const struct signature *signatures) {
    for (int r = 1; r < g->size; r++) {
        if (memcmp(&signatures[r], &signatures[0], sizeof signatures[0]) == 0) {
            continue;
        }
        char first[TEXT_BYTES], other[TEXT_BYTES];
        signature_text(first, &signatures[0]);
        signature_text(other, &signatures[r]);
        if (g->rank != 0) {
            leave_it_to_others();
        }
        error_fatal(__FILE__, __LINE__,
                    "the ranks of group %s call different collectives: rank %d %s, rank %d %s; all "
                    "must make the same calls in the same order",
                    g->name, g->job_ranks[0], first, g->job_ranks[r], other);
    }
}

void point_compare(const struct call *recv, const struct signature *send) {
    char expected[TEXT_BYTES], found[TEXT_BYTES];
    struct signature mine = signature_of(recv);
    if (send->count == mine.count && send->dtype == mine.dtype) {
        return;
    }
    signature_text(expected, &mine);
    signature_text(found, send);
    error_fatal(__FILE__, __LINE__,
                "in group %s this rank's %s from rank %d meets that rank's %s; expected the same "
                "count and type",
                recv->group->name, expected, recv->group->job_ranks[recv->peer], found);
}

// ---- ranks that do not come --------------------------------------------------------------------

// "0 1 5"
static void ranks_text(char *text, size_t size, const struct comm_group *g, const bool *set,
                       bool wanted) {
    size_t length = 0;
    text[0] = '\0';
    for (int r = 0; r < g->size && length + 12 < size; r++) {
        if (set[r] == wanted) {
            length += (size_t)snprintf(text + length, size - length, " %d", g->job_ranks[r]);
        }
    }
}

void report_late(const struct call *call, const bool *entered) {
    const struct comm_group *g = call->group;
    struct signature s = signature_of(call);
    char text[TEXT_BYTES], in[1024], out[1024];
    signature_text(text, &s);
    // Many ranks wait in a call, and one message is enough: the first prints, and the job is over.
    bool first = true;
    for (int r = 0; r < g->rank && entered != NULL; r++) {
        first = first && !entered[r];
    }
    if (!first) {
        leave_it_to_others();
    }
    // mpirun continues a rank that was stopped before it ends it. That rank must not tell that it
    // waits for ranks which are gone.
    if (stop_continued_s_ago() < comm_mpi_config.timeout_s + OTHERS_S) {
        leave_it_to_others();
    }
    if (call->kind == COMM_SEND || call->kind == COMM_RECV) {
        error_fatal(__FILE__, __LINE__,
                    "%s %s rank %d of group %s is not over after %g s (--comm-timeout)", text,
                    call->kind == COMM_SEND ? "to" : "from", g->job_ranks[call->peer], g->name,
                    comm_mpi_config.timeout_s);
    }
    ranks_text(in, sizeof in, g, entered, true);
    ranks_text(out, sizeof out, g, entered, false);
    error_fatal(
        __FILE__, __LINE__,
        "%s in group %s is not complete after %g s (--comm-timeout): entered by rank%s, not "
        "by rank%s; they are stopped, or busy, or call something else (--check-comm tells)",
        text, g->name, comm_mpi_config.timeout_s, in, out);
}

// ---- log ---------------------------------------------------------------------------------------

static FILE *calls_log;

void log_calls_open(const char *prefix, int rank) {
    char path[4096];
    snprintf(path, sizeof path, "%s.%d", prefix, rank);
    calls_log = fopen(path, "w");
    if (calls_log == NULL) {
        error_user("--log-comm: cannot write %s: %m", path);
    }
    fputs("number\toperation\tgroup\tcount\tdtype\top\troot\n", calls_log);
}

void log_call(const struct call *call) {
    if (calls_log == NULL) {
        return;
    }
    bool reduces = call->kind == COMM_ALL_REDUCE || call->kind == COMM_REDUCE_SCATTER;
    fprintf(calls_log, "%llu\t%s\t%s\t%zu\t%s\t%s\t", (unsigned long long)call->number,
            comm_kind_name(call->kind), call->group->name, call->count, dtype_name(call->dtype),
            !reduces               ? "-"
            : call->op == COMM_SUM ? "sum"
                                   : "max");
    if (has_root(call->kind)) {
        fprintf(calls_log, "%d\n", call->peer);
    } else {
        fputs("-\n", calls_log);
    }
}

bool log_calls_close(void) {
    bool good = calls_log == NULL || fclose(calls_log) == 0;
    calls_log = NULL;
    return good;
}
