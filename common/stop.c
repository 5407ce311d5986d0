// Signals are taken by a thread of their own. A handler would run on the stack of a thread that
// computes, and there its frame can overwrite what a library's kernel keeps below the stack's end:
// now and then a step came out different.
#include "stop.h"
#include "comm.h"
#include "error.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

// mpirun also sends a signal to the ranks that are left when one has failed or refused. So long
// they may take to end by themselves before one says that it stops.
enum { WAIT_MS = 200 };

static atomic_int caught; // number of the signal, 0: none
static sigset_t taken; // by stop_init()

static bool is_ignored(int number) {
    struct sigaction now;
    return sigaction(number, NULL, &now) == 0 && now.sa_handler == SIG_IGN;
}

// Those that somebody has set to be ignored, as nohup does, stay so.
static int signals_take(void) {
    static const int NUMBERS[] = {SIGINT, SIGTERM, SIGHUP};
    int count = 0;
    sigemptyset(&taken);
    for (size_t i = 0; i < sizeof NUMBERS / sizeof NUMBERS[0]; i++) {
        if (!is_ignored(NUMBERS[i])) {
            sigaddset(&taken, NUMBERS[i]);
            count++;
        }
    }
    return count;
}

// Of several ranks one tells. Where nobody reads stderr any more, that is no reason to die.
static void tell(void) {
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, NULL);
    if (error_rank() == 0) {
        error_warning("stopping after this step; once more to quit now");
    }
}

// Waits for a signal, if `limit` is not NULL for so long; 0: none came.
static int signal_wait(const struct timespec *limit) {
    int number;
    do {
        number = sigtimedwait(&taken, NULL, limit);
    } while (number < 0 && errno == EINTR);
    return number < 0 ? 0 : number;
}

// The first signal is remembered; the second ends the program as it would have without us.
static void *wait_for_signals(void *unused) {
    const struct timespec moment = {
        .tv_nsec = WAIT_MS * 1000000,
    };
    (void)unused;
    atomic_store(&caught, signal_wait(NULL));
    bool alone = strcmp(comm_transport(), "self") == 0;
    int number = alone ? 0 : signal_wait(&moment);
    if (number == 0) {
        tell();
        number = signal_wait(NULL);
    }
    signal(number, SIG_DFL);
    pthread_sigmask(SIG_UNBLOCK, &taken, NULL);
    raise(number);
    return NULL;
}

void stop_init(void) {
    pthread_t thread;
    signal(SIGXFSZ, SIG_IGN); // a write beyond `ulimit -f` then fails like one to a full disk
    if (signals_take() == 0) {
        return;
    }
    CHECK(pthread_sigmask(SIG_BLOCK, &taken, NULL) == 0); // threads made later inherit it
    CHECK(pthread_create(&thread, NULL, wait_for_signals, NULL) == 0);
    CHECK(pthread_detach(thread) == 0);
}

bool stop_requested(void) {
    return atomic_load(&caught) != 0;
}

int stop_exit_code(void) {
    int number = atomic_load(&caught);
    return number != 0 ? 128 + number : 0;
}
