// Signals are taken by a thread of their own. A handler would run on the stack of a thread that
// computes, and there its frame can overwrite what a library's kernel keeps below the stack's end:
// now and then a step came out different.
#include "stop.h"
#include "error.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>

static atomic_int caught; // number of the signal, 0: none

static sigset_t signals(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    return set;
}

// The first signal is remembered; the second ends the program as it would have without us.
static void *wait_for_signals(void *unused) {
    sigset_t set = signals();
    int number;
    (void)unused;
    CHECK(sigwait(&set, &number) == 0);
    atomic_store(&caught, number);
    CHECK(sigwait(&set, &number) == 0);
    signal(number, SIG_DFL);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    raise(number);
    return NULL;
}

void stop_init(void) {
    sigset_t set = signals();
    pthread_t thread;
    CHECK(pthread_sigmask(SIG_BLOCK, &set, NULL) == 0); // threads made later inherit it
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
