#include "stop.h"
#include <signal.h>
#include <string.h>

static volatile sig_atomic_t caught; // number of the signal

static void on_signal(int number) {
    caught = number;
}

void stop_init(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_signal;
    action.sa_flags = (int)SA_RESETHAND | SA_RESTART; // the second one ends the program
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool stop_requested(void) {
    return caught != 0;
}

int stop_exit_code(void) {
    return caught != 0 ? 128 + caught : 0;
}
