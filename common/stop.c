// Signals are taken by a thread of their own. A handler would run on the stack of a thread that
// computes, and there its frame can overwrite what a library's kernel keeps below the stack's end:
// now and then a step came out different.
#include "stop.h"
#include "clock.h"
#include "comm.h"
#include "error.h"
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

static atomic_int caught; // number of the signal, 0: none
static _Atomic double continued_s = -INFINITY; // when SIGCONT came
static sigset_t taken; // by stop_init()

static bool is_ignored(int number) {
    struct sigaction now;
    return sigaction(number, NULL, &now) == 0 && now.sa_handler == SIG_IGN;
}

// Those that somebody has set to be ignored, as nohup does, stay so.
static void signals_take(void) {
    static const int NUMBERS[] = {SIGINT, SIGTERM, SIGHUP};
    sigemptyset(&taken);
    sigaddset(&taken, SIGCONT);
    for (size_t i = 0; i < sizeof NUMBERS / sizeof NUMBERS[0]; i++) {
        if (!is_ignored(NUMBERS[i])) {
            sigaddset(&taken, NUMBERS[i]);
        }
    }
}

// Who pressed Ctrl-C, with one process. mpirun also signals the ranks that are left when one has
// failed or refused, and there is nothing to tell. Where nobody reads stderr any more, that is no
// reason to die.
static void tell(int number) {
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, NULL);
    if (number == SIGINT && strcmp(comm_transport(), "self") == 0) {
        error_warning("stopping after this step; once more to quit now");
    }
}

// The next signal that asks to end.
static int signal_wait(void) {
    int number = SIGCONT;
    while (number == SIGCONT) {
        CHECK(sigwait(&taken, &number) == 0);
        if (number == SIGCONT) {
            atomic_store(&continued_s, clock_s());
        }
    }
    return number;
}

// The first signal is remembered; the second ends the program as it would have without us.
static void *wait_for_signals(void *unused) {
    (void)unused;
    int number = signal_wait();
    atomic_store(&caught, number);
    tell(number);
    number = signal_wait();
    signal(number, SIG_DFL);
    pthread_sigmask(SIG_UNBLOCK, &taken, NULL);
    raise(number);
    return NULL;
}

void stop_init(void) {
    pthread_t thread;
    signal(SIGXFSZ, SIG_IGN); // a write beyond `ulimit -f` then fails like one to a full disk
    signals_take();
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

double stop_continued_s_ago(void) {
    return clock_s() - atomic_load(&continued_s);
}
