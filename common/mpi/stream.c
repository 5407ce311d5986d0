// The communication stream: calls are run one after the other, in the order in which they were
// enqueued, beside the computation.
//
// A thread runs them. But whoever waits for a call runs calls himself in the meantime, since waking
// the thread would take longer than most calls on a few bytes. Both hold `running` meanwhile, so
// that the order holds. Sends and receives are begun in this order and end when they end; calls
// behind them do not wait.
#include "error.h"
#include "trace.h"
#include "transport.h"
#include <pthread.h>
#include <time.h>

enum {
    CALLS_MAX = 4096, // calls that are not done
    POLL_US = 20, // between two looks at sends and receives that are under way
};

_Thread_local bool stream_is_thread;

static struct {
    pthread_mutex_t mutex; // guards what follows
    pthread_cond_t changed; // a call is done, or running ended: for those who wait
    pthread_cond_t work; // there is something to do: for the thread
    pthread_t thread;
    bool threaded; // the thread exists
    bool stop;
    bool wake; // the thread is wanted
    bool running; // somebody runs calls
    uint64_t pushed; // tickets are 1, 2, 3, …
    uint64_t begun; // calls that left the queue
    struct call calls[CALLS_MAX]; // (ticket % CALLS_MAX)
    bool done[CALLS_MAX];
} stream = {
    .mutex = PTHREAD_MUTEX_INITIALIZER,
    .changed = PTHREAD_COND_INITIALIZER,
    .work = PTHREAD_COND_INITIALIZER,
};

static void record(const struct call *call, double end_us) {
    bool parts = call->kind == COMM_REDUCE_SCATTER || call->kind == COMM_ALL_GATHER;
    size_t count = parts ? call->count * (size_t)call->group->size : call->count;
    trace_record_call(&(struct trace_call){
        .kind = call->kind,
        .group = call->group->name,
        .group_size = call->group->size,
        .count = count,
        .dtype = call->dtype,
        .bytes = count * dtype_size(call->dtype),
        .number = call->number,
        .enqueued_us = call->enqueued_us,
        .begin_us = call->begin_us,
        .end_us = end_us,
    });
}

// The call is over. The caller holds `running`, not the mutex.
static void finish(uint64_t ticket, const struct call *call) {
    if (trace_on()) {
        record(call, trace_now_us());
    }
    pthread_mutex_lock(&stream.mutex);
    stream.done[ticket % CALLS_MAX] = true;
    pthread_cond_broadcast(&stream.changed);
    pthread_mutex_unlock(&stream.mutex);
}

static void run(uint64_t ticket, struct call *call) {
    call->begin_us = trace_on() ? trace_now_us() : 0;
    if (call->kind == COMM_SEND || call->kind == COMM_RECV) {
        messages_begin(call, ticket);
        return;
    }
    if (call->group->size > 1 && call->group->shared != NULL) {
        shared_run(call->group->shared, call);
    } else {
        messages_run(call);
    }
    finish(ticket, call);
}

// Is there something for the thread? The caller has the mutex, and `running` is false.
static bool thread_wanted(void) {
    return stream.stop || (stream.wake && stream.begun < stream.pushed) || messages_pending() > 0;
}

// Nobody runs calls any more. The caller has the mutex.
static void running_ends(void) {
    stream.running = false;
    stream.wake = stream.wake && stream.begun < stream.pushed;
    pthread_cond_broadcast(&stream.changed);
    if (thread_wanted()) {
        pthread_cond_signal(&stream.work);
    }
}

// Begins the next call, if there is one, and looks at the sends and receives under way. The caller
// has the mutex and `running` is false; both are so again at the end.
static void run_next(void) {
    stream.running = true;
    if (stream.begun < stream.pushed) {
        uint64_t ticket = ++stream.begun;
        struct call call = stream.calls[ticket % CALLS_MAX];
        pthread_mutex_unlock(&stream.mutex);
        run(ticket, &call);
    } else {
        pthread_mutex_unlock(&stream.mutex);
    }
    messages_progress(finish);
    pthread_mutex_lock(&stream.mutex);
    running_ends();
}

// Lets go of the mutex for a moment.
static void pause_polling(void) {
    pthread_mutex_unlock(&stream.mutex);
    nanosleep(&(struct timespec){.tv_nsec = POLL_US * 1000}, NULL);
    pthread_mutex_lock(&stream.mutex);
}

static void *thread_main(void *unused) {
    (void)unused;
    stream_is_thread = true;
    pthread_mutex_lock(&stream.mutex);
    while (!stream.stop) {
        if (stream.running || !thread_wanted()) {
            pthread_cond_wait(&stream.work, &stream.mutex);
            continue;
        }
        run_next();
        if (stream.begun == stream.pushed && messages_pending() > 0) {
            pause_polling();
        }
    }
    pthread_mutex_unlock(&stream.mutex);
    return NULL;
}

void stream_start(void) {
    CHECK(pthread_create(&stream.thread, NULL, thread_main, NULL) == 0);
    stream.threaded = true;
}

// The caller has the mutex.
static void wait_while_undone(uint64_t ticket) {
    while (!stream.done[ticket % CALLS_MAX]) {
        if (stream.running) {
            pthread_cond_wait(&stream.changed, &stream.mutex);
            continue;
        }
        run_next();
        if (!stream.done[ticket % CALLS_MAX] && stream.begun == stream.pushed) {
            pause_polling(); // it is a send or a receive
        }
    }
}

uint64_t stream_push(const struct call *call, bool wake) {
    pthread_mutex_lock(&stream.mutex);
    uint64_t ticket = stream.pushed + 1;
    if (ticket > CALLS_MAX) {
        wait_while_undone(ticket - CALLS_MAX); // the place is taken until that one is done
    }
    stream.calls[ticket % CALLS_MAX] = *call;
    stream.done[ticket % CALLS_MAX] = false;
    stream.pushed = ticket;
    if (wake) {
        stream.wake = true;
        pthread_cond_signal(&stream.work);
    }
    pthread_mutex_unlock(&stream.mutex);
    return ticket;
}

void stream_wait(uint64_t ticket) {
    pthread_mutex_lock(&stream.mutex);
    CHECK(ticket <= stream.pushed);
    if (stream.pushed - ticket < CALLS_MAX) { // else its place would not have been taken
        wait_while_undone(ticket);
    }
    pthread_mutex_unlock(&stream.mutex);
}

void stream_acquire(void) {
    pthread_mutex_lock(&stream.mutex);
    for (uint64_t t = stream.pushed > CALLS_MAX ? stream.pushed - CALLS_MAX + 1 : 1;
         t <= stream.pushed; t++) {
        wait_while_undone(t);
    }
    while (stream.running) {
        pthread_cond_wait(&stream.changed, &stream.mutex);
    }
    stream.running = true;
    pthread_mutex_unlock(&stream.mutex);
}

void stream_release(void) {
    pthread_mutex_lock(&stream.mutex);
    running_ends();
    pthread_mutex_unlock(&stream.mutex);
}

void stream_stop(void) {
    stream_acquire();
    stream_release();
    pthread_mutex_lock(&stream.mutex);
    stream.stop = true;
    pthread_cond_signal(&stream.work);
    pthread_mutex_unlock(&stream.mutex);
    if (stream.threaded) {
        CHECK(pthread_join(stream.thread, NULL) == 0);
    }
}
