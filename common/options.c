#include "options.h"
#include "error.h"
#include <string.h>

enum {
    COMMON_ARGS_MAX = 64,
    MICRO_BATCHES_FREE = 1024, // as many may be given for any batch; some are empty then
};

static size_t append(struct arg *table, size_t count, const struct arg *more, size_t more_count) {
    CHECK(count + more_count < COMMON_ARGS_MAX);
    memcpy(table + count, more, more_count * sizeof *more);
    return count + more_count;
}

#define APPEND(table, count, more) append(table, count, more, sizeof(more) / sizeof((more)[0]))

static size_t training_args(struct options *o, struct arg *table, size_t count) {
    const struct arg args[] = {
        {"--data", ARG_STRING, &o->data, .unit = "PATH", .group = "Training",
         .help = "text file (llama) or IDX folder (mnist)", .absent = "installed by setup"},
        {"--seed", ARG_INT, &o->seed, 0, 9007199254740992.0,
         .help = "number from which all randomness follows"},
        {"--threads", ARG_INT, &o->threads, 0, 4096,
         .help = "compute threads of a process; 0: all cores"},
        {"--steps", ARG_INT, &o->steps, 0, 1e12, .absent = o->steps == 0 ? "by --epochs" : NULL,
         .help = "length of the whole training, which the learning rate follows"},
        {"--epochs", ARG_INT, &o->epochs, 0, 1e6, .absent = o->epochs == 0 ? "by --steps" : NULL,
         .help = "length of the whole training, in passes over the data"},
        {"--stop-after", ARG_INT, &o->stop_after, 0, 1e12, .absent = "off",
         .help = "end this run after N more steps, wherever in the training that is"},
        {"--batch", ARG_INT, &o->batch, 1, 1 << 24, .help = "samples in a step, over all ranks",
         .absent = o->batch == 0 ? "by --size" : NULL},
        {"--micro-batches", ARG_INT, &o->micro_batches, 1, 1 << 16,
         .help = "parts of a step that go through the model one after the other"},
        {"--eval-every", ARG_INT, &o->eval_every, 0, 1e12,
         .help = "steps between evaluations; 0: one at the end",
         .absent = o->eval_every < 0 ? "an epoch" : NULL},
        {"--eval-batch", ARG_INT, &o->eval_batch, 1, 1 << 20,
         .help = "samples that an evaluation takes at a time"},
    };
    return APPEND(table, count, args);
}

static size_t optimizer_args(struct options *o, struct arg *table, size_t count) {
    const struct arg args[] = {
        {"--optimizer", ARG_CHOICE, &o->optimizer, .choices = "sgd|adamw|adadelta",
         .group = "Optimizer", .help = "how gradients change parameters"},
        {"--lr", ARG_DOUBLE, &o->lr, 0, 1e6, .help = "largest learning rate"},
        {"--schedule", ARG_CHOICE, &o->schedule, .choices = "constant|cosine|step",
         .help = "how the learning rate falls"},
        {"--warmup", ARG_INT, &o->warmup, 0, 1e9,
         .help = "steps in which the learning rate rises to --lr"},
        {"--min-lr", ARG_DOUBLE, &o->min_lr, 0, 1e6,
         .help = "learning rate where schedule cosine ends",
         .absent = o->min_lr < 0 ? "a tenth of --lr" : NULL},
        {"--gamma", ARG_DOUBLE, &o->gamma, 0, 1,
         .help = "what schedule step multiplies the learning rate with, each epoch"},
        {"--beta1", ARG_DOUBLE, &o->beta1, 0, 0.9999999,
         .help = "adamw: decay of the first moment"},
        {"--beta2", ARG_DOUBLE, &o->beta2, 0, 0.9999999,
         .help = "adamw: decay of the second moment"},
        {"--rho", ARG_DOUBLE, &o->rho, 0, 0.9999999, .help = "adadelta: decay of both averages"},
        {"--eps", ARG_DOUBLE, &o->eps, 1e-30, 1, .absent = "1e-8; adadelta: 1e-6",
         .help = "added to the divisor, to keep it away from 0"},
        {"--weight-decay", ARG_DOUBLE, &o->weight_decay, 0, 1e3,
         .help = "weight decay, of matrices only"},
        {"--clip", ARG_DOUBLE, &o->clip, 0, 1e9, .help = "cut gradients down to this norm; 0: off"},
    };
    return APPEND(table, count, args);
}

static size_t save_args(struct options *o, struct arg *table, size_t count) {
    const struct arg args[] = {
        {"--save", ARG_STRING, &o->save, .unit = "DIR", .group = "Files",
         .help = "write a checkpoint into this folder at the end"},
        {"--save-sharded", ARG_STRING, &o->save_sharded, .unit = "DIR",
         .help = "the same, but each rank writes its parts; --load and --resume read both"},
    };
    bool alone = strcmp(comm_transport(), "self") == 0; // then there is only the whole to write
    return append(table, count, args, alone ? 1 : 2);
}

static size_t file_args(struct options *o, struct arg *table, size_t count) {
    count = save_args(o, table, count);
    const struct arg args[] = {
        {"--save-every", ARG_INT, &o->save_every, 0, 1e12,
         .help = "with --save: steps between checkpoints; 0: one at the end"},
        {"--load", ARG_STRING, &o->load, .unit = "DIR",
         .help = "start from the weights of a checkpoint"},
        {"--resume", ARG_STRING, &o->resume, .unit = "DIR",
         .help = "go on where a checkpoint ends: weights, optimizer, step"},
        {"--log", ARG_STRING, &o->log, .unit = "FILE", .help = "write one JSON object a step"},
        {"--print-every", ARG_INT, &o->print_every, 1, 1e12, .absent = "about 20 lines",
         .help = "steps between lines on the terminal"},
        {"--dump", ARG_STRING, &o->dump, .unit = "DIR",
         .help = "write exact losses, norms, gradients, weights"},
        {"--logits", ARG_STRING, &o->logits, .unit = "FILE",
         .help = "write the logits of the first validation sample"},
        {"--memory", ARG_STRING, &o->memory, .unit = "FILE",
         .help = "write the memory in use, by category, as a table (TSV): megabytes a "
                 "minute, for each allocation is a line"},
        {"--trace", ARG_STRING, &o->trace, .unit = "FILE",
         .help = "write a timeline for a trace viewer (Perfetto)"},
    };
    return APPEND(table, count, args);
}

// Only where the ranks of a program can be several.
static size_t comm_args(struct options *o, struct arg *table, size_t count) {
    const struct arg args[] = {
        {"--check-comm", ARG_FLAG, &o->comm.check, .group = "Communication",
         .help = "compare what the ranks call, call by call"},
        {"--comm-timeout", ARG_DOUBLE, &o->comm.timeout_s, 0, 1e6,
         .help = "seconds until a collective that some ranks have not entered ends the job; 0: "
                 "never"},
        {"--comm-messages", ARG_FLAG, &o->comm.messages,
         .help = "MPI messages even between ranks of one machine"},
        {"--log-comm", ARG_STRING, &o->comm.log, .unit = "PREFIX",
         .help = "each rank's calls, in PREFIX.RANK"},
    };
    return APPEND(table, count, args);
}

struct options options_defaults(void) {
    return (struct options){
        .seed = 1,
        .stop_after = -1,
        .micro_batches = 1,
        .gamma = 0.7,
        .beta1 = 0.9,
        .beta2 = 0.95,
        .rho = 0.9,
        .temperature = 0.8,
        .comm = {.timeout_s = 300},
    };
}

// All ranks need the same flags, but for threads.
static void must_match(const char *name, const char *value) {
    if (strcmp(name, "--threads") != 0) {
        comm_must_match(name, value);
    }
}

// What cannot be told flag by flag.
static void finish(struct options *o) {
    if (args_given("--steps") && args_given("--epochs")) {
        error_user("--steps %ld and --epochs %ld both say how long to train; give one of them",
                   (long)o->steps, (long)o->epochs);
    }
    if (args_given("--steps")) {
        o->epochs = 0;
    } else if (args_given("--epochs")) {
        o->steps = 0;
    }
    if (o->load != NULL && o->resume != NULL) {
        error_user("--load %s and --resume %s both say where to start; give one of them", o->load,
                   o->resume);
    }
    if (o->save_every > 0 && o->save == NULL && o->save_sharded == NULL) {
        error_user("--save-every %ld needs --save DIR, the folder to write", (long)o->save_every);
    }
    if (o->micro_batches > MICRO_BATCHES_FREE && o->micro_batches > o->batch) {
        error_user("--micro-batches %ld cuts a step into more parts than --batch has samples, and "
                   "most would be empty; choose at most the samples of --batch (or %d)",
                   (long)o->micro_batches, MICRO_BATCHES_FREE);
    }
    if (o->min_lr < 0) {
        o->min_lr = o->lr / 10;
    }
    if (!args_given("--eps")) {
        o->eps = strcmp(o->optimizer, "adadelta") == 0 ? 1e-6 : 1e-8;
    }
}

void options_parse(struct options *o, int argc, char **argv, const char *program,
                   const struct arg *model, const struct arg *chapter) {
    struct arg common[COMMON_ARGS_MAX] = {0};
    size_t count = training_args(o, common, 0);
    count = optimizer_args(o, common, count);
    count = file_args(o, common, count);
    if (strcmp(comm_transport(), "self") != 0) {
        comm_args(o, common, count);
    }
    const struct arg *const tables[] = {chapter, model, common};
    args_parse(argc, argv, program, tables, 3);
    finish(o);
    args_each(must_match);
}
