// Fully sharded data parallelism: the ranks share the samples of a step, as in chapter 02, and what
// chapter 02 keeps on every rank, each keeps a part of.
//
// What it does. The flat buffer of a unit is cut into equal parts, one for each rank (padded, if it
// does not divide). How much of the training is cut is the level, in three steps of ZeRO:
//
//     --shard       cut on n ranks                  sent in a step      memory, 4 bytes times
//     none          nothing                         all-reduce          P + P + 2P
//     optimizer     optimizer state                 the same            P + P + 2P/n
//     gradients     + gradients                     the same            P + P/n + 2P/n
//     parameters    + parameters                    half as much again  P/n + P/n + 2P/n
//
// (P parameters; one micro-batch; AdamW's state is two moments.) An all-reduce is a reduce-scatter,
// after which each rank has the sum of its part, and an all-gather, after which all have all parts.
// Between the two there is room for the optimizer: a rank needs the gradients of its part only to
// update its part.
//
//     backward   unit 2        unit 1                unit 0
//                 fresh 2 -->  reduce-scatter 2 -->  reduce-scatter 1 --> …
//                              grads part 2 (+)=     grads part 1 (+)=
//
// With cut parameters a unit is gathered before it runs and freed when it has run, in forward and
// again in backward. While it runs, the next one is on its way:
//
//     forward    gather 0 | unit 0     | unit 1     | unit 2  ->  backward  unit 2     | unit 1 …
//                         | gather 1   | gather 2   |                       gather 1   | gather 0
//
// So at any moment at most 1 + prefetch units are gathered. (PyTorch calls that limit_all_gathers.)
//
// The wrap is what is gathered at once: one unit, or several (--wrap-params). Larger wraps mean
// fewer and larger messages, and more memory.
//
// Hybrid sharding: with --replicas R the ranks form R groups. Inside a group the model is cut; the
// ranks with the same part in all groups add up their sums by one more all-reduce, of a part only.
// Where machines hold a group each, the slow network between them carries just that.
//
// What is left out: parameters that live in the host's memory (chapter 06).
//
// Sources: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
// Models", 2020, section 5 (stages 1, 2, 3); Zhao et al., "PyTorch FSDP: Experiences on Scaling
// Fully Sharded Data Parallel", 2023, sections 3 and 4.
#include "shard.h"
#include "common/device.h"
#include "common/error.h"
#include "common/ops.h"
#include "common/trace.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 16 }; // elements: parts begin at multiples of 64 bytes

enum level { LEVEL_NONE, LEVEL_OPTIMIZER, LEVEL_GRADIENTS, LEVEL_PARAMETERS };

// Units that are gathered and reduced together.
struct wrap {
    int first; // units first … last - 1
    int last;
    size_t size; // elements of its whole flat buffer, with padding
    size_t begin; // where that begins among those of all wraps
    struct tensor gathered; // (size) or no tensor
    struct comm_handle gather; // under way
    struct comm_handle reduction; // under way
};

struct shard {
    const struct shard_config *config;
    enum level level;
    int index; // of this rank in its group
    int parts; // ranks in a group
    int number; // of the group
    struct comm group;
    struct comm replicas;
    int units;
    size_t *sizes; // (units) elements of a unit's flat buffer
    size_t *offset; // (units) where a unit begins in its wrap
    int *wrap_of; // (units)
    struct wrap *wraps; // (wrap_count)
    int wrap_count;

    struct tensor fresh; // gradients that backward is writing, of a whole wrap
    struct wrap *reducing; // the wrap whose fresh gradients are being reduced, or NULL
    struct tensor reduced; // those gradients
    struct tensor sum; // where their sum goes if it is to be added, else no tensor
    bool last; // no more will be added in this step
};

// ---- who holds what ----------------------------------------------------------------------------

static enum level level_of(const char *name, int parts) {
    if (parts == 1 || strcmp(name, "none") == 0) {
        return LEVEL_NONE;
    }
    return strcmp(name, "optimizer") == 0   ? LEVEL_OPTIMIZER
           : strcmp(name, "gradients") == 0 ? LEVEL_GRADIENTS
                                            : LEVEL_PARAMETERS;
}

static size_t round_up(size_t count, size_t multiple) {
    return (count + multiple - 1) / multiple * multiple;
}

// A wrap ends when it has enough parameters, and pads what does not divide by the parts.
static void wraps_init(struct shard *s) {
    size_t begin = 0;
    for (int u = 0; u < s->units;) {
        struct wrap *w = &s->wraps[s->wrap_count];
        w->first = u;
        w->begin = begin;
        do {
            s->offset[u] = w->size;
            s->wrap_of[u] = s->wrap_count;
            w->size += s->sizes[u++];
        } while (u < s->units && w->size < (size_t)s->config->wrap_params);
        w->last = u;
        w->size = round_up(w->size, (size_t)s->parts * ALIGN);
        begin += w->size;
        s->wrap_count++;
    }
}

struct shard *shard_create(const struct shard_config *config, struct comm world,
                           const struct model *model) {
    if (world.size % config->replicas != 0) {
        error_user("--replicas %ld does not divide the %d ranks; expected a divisor",
                   (long)config->replicas, world.size);
    }
    struct shard *s = calloc(1, sizeof *s);
    CHECK(s != NULL);
    s->config = config;
    s->level = level_of(config->level, world.size / config->replicas);
    s->parts = s->level == LEVEL_NONE ? 1 : world.size / config->replicas;
    s->index = world.rank % s->parts;
    s->number = world.rank / s->parts;
    s->units = model_units(model);
    s->sizes = calloc(s->units, sizeof *s->sizes);
    s->offset = calloc(s->units, sizeof *s->offset);
    s->wrap_of = calloc(s->units, sizeof *s->wrap_of);
    s->wraps = calloc(s->units, sizeof *s->wraps);
    CHECK(s->sizes != NULL && s->offset != NULL && s->wrap_of != NULL && s->wraps != NULL);
    for (int u = 0; u < s->units; u++) {
        s->sizes[u] = unit_size(model, u);
    }
    wraps_init(s);
    return s;
}

void shard_connect(struct shard *s, struct comm world) {
    s->group = comm_split(world, s->number, "shard");
    s->replicas = comm_split(world, s->index, "replicas");
}

void shard_free(struct shard *s) {
    for (int w = 0; w < s->wrap_count; w++) {
        comm_wait(s->wraps[w].gather);
        tensor_free(&s->wraps[w].gathered);
    }
    free(s->wraps);
    free(s->wrap_of);
    free(s->offset);
    free(s->sizes);
    free(s);
}

void shard_describe(const struct shard *s, char *text, size_t size) {
    const struct shard_config *c = s->config;
    if (s->level == LEVEL_NONE) {
        snprintf(text, size, "none, every rank has the whole model");
        return;
    }
    char replicas[40] = "", ahead[40] = "";
    if (s->replicas.size > 1) {
        snprintf(replicas, sizeof replicas, ", %d replicas", s->replicas.size);
    }
    if (s->level == LEVEL_PARAMETERS) {
        snprintf(ahead, sizeof ahead, ", prefetch %ld%s", (long)c->prefetch,
                 c->keep_gathered ? ", kept gathered" : "");
    }
    snprintf(text, size, "%s over %d ranks%s, wraps %d%s%s", c->level, s->parts, replicas,
             s->wrap_count, ahead, c->no_sync ? ", no sync" : "");
}

struct comm shard_group(const struct shard *s) {
    return s->group;
}

struct comm shard_replicas(const struct shard *s) {
    return s->replicas;
}

bool shard_cuts(const struct shard *s, enum mem_category what) {
    return (what == MEM_OPTIMIZER && s->level >= LEVEL_OPTIMIZER) ||
           (what == MEM_GRADS && shard_reduces_fresh(s)) ||
           (what == MEM_PARAMS && s->level >= LEVEL_PARAMETERS);
}

// What rank `index` of the group updates of unit u: where its part of the wrap meets the unit.
static struct range part_range(const struct shard *s, int u, int index) {
    size_t part = s->wraps[s->wrap_of[u]].size / (size_t)s->parts;
    size_t begin = part * (size_t)index;
    size_t end = begin + part;
    size_t from = s->offset[u];
    size_t to = from + s->sizes[u];
    begin = begin < from ? from : begin > to ? to : begin;
    end = end < from ? from : end > to ? to : end;
    return (struct range){begin - from, end - from};
}

struct range shard_range(const struct shard *s, int u, enum mem_category what) {
    return shard_cuts(s, what) ? part_range(s, u, s->index) : (struct range){0, s->sizes[u]};
}

// ---- buffers -----------------------------------------------------------------------------------

// Where wrap w begins in a buffer of all wraps.
static size_t wrap_begin(const struct shard *s, int w, enum mem_category what) {
    const struct wrap *last = &s->wraps[s->wrap_count - 1];
    size_t begin = w < s->wrap_count ? s->wraps[w].begin : last->begin + last->size;
    return shard_cuts(s, what) ? begin / (size_t)s->parts : begin;
}

size_t shard_elements(const struct shard *s, enum mem_category what) {
    return wrap_begin(s, s->wrap_count, what);
}

struct tensor shard_unit(const struct shard *s, struct tensor all, enum mem_category what, int u) {
    int w = s->wrap_of[u];
    struct range mine = shard_range(s, u, what);
    size_t part = s->wraps[w].size / (size_t)s->parts;
    size_t before = shard_cuts(s, what) ? part * (size_t)s->index : 0; // of the wrap
    size_t at = mine.end > mine.begin ? s->offset[u] + mine.begin - before : 0;
    return tensor_view(all, wrap_begin(s, w, what) + at, mine.end - mine.begin, 1);
}

struct tensor shard_view(const struct shard *s, const struct tensor *buffer, enum mem_category what,
                         int u, struct range elements) {
    struct range mine = shard_range(s, u, what);
    if (elements.begin == elements.end) {
        return tensor_view(buffer[u], 0, 0, 1);
    }
    CHECK(elements.begin >= mine.begin && elements.end <= mine.end);
    return tensor_view(buffer[u], elements.begin - mine.begin, elements.end - elements.begin, 1);
}

// This rank's part of a wrap, in a buffer that holds the part or the whole.
static struct tensor wrap_part(const struct shard *s, const struct tensor *buffer,
                               enum mem_category what, int w) {
    struct tensor part = buffer[s->wraps[w].first]; // what the wrap begins with, without padding
    part.rows = s->wraps[w].size / (size_t)s->parts;
    if (shard_cuts(s, what)) {
        return part;
    }
    struct tensor whole = part;
    whole.rows = s->wraps[w].size;
    return tensor_view(whole, part.rows * (size_t)s->index, part.rows, 1);
}

static struct tensor wrap_whole(const struct shard *s, const struct tensor *buffer, int w) {
    struct tensor whole = buffer[s->wraps[w].first];
    whole.rows = s->wraps[w].size;
    return whole;
}

// What rank `index` knows right of unit u: after a reduction a rank has the sums of its part only.
static struct range known_range(const struct shard *s, int u, enum mem_category what, int index) {
    bool whole = s->level == LEVEL_NONE || (what == MEM_PARAMS && !shard_cuts(s, what));
    return whole ? (struct range){0, s->sizes[u]} : part_range(s, u, index);
}

struct range range_meet(struct range a, struct range b) {
    struct range both = {
        .begin = a.begin > b.begin ? a.begin : b.begin,
        .end = a.end < b.end ? a.end : b.end,
    };
    return both.begin < both.end ? both : (struct range){a.begin, a.begin};
}

// Sends elements of unit u to rank 0.
static void send(struct shard *s, struct tensor some) {
    float *host = malloc(tensor_count(some) * sizeof *host);
    CHECK(host != NULL);
    device_download(host, some);
    comm_send_host(s->group, host, tensor_count(some) * sizeof *host, 0);
    free(host);
}

void shard_collect(struct shard *s, const struct tensor *buffer, enum mem_category what, int u,
                   struct range elements, float *whole) {
    if (s->number > 0) {
        return; // this group has the same as the first one
    }
    comm_wait(s->wraps[s->wrap_of[u]].gather);
    size_t done = elements.begin;
    for (int r = 0; r < s->parts && done < elements.end; r++) {
        struct range some = range_meet(elements, known_range(s, u, what, r));
        size_t count = some.end - some.begin;
        done = count > 0 ? some.end : done;
        if (count > 0 && r == s->index && r == 0) {
            device_download(whole + (some.begin - elements.begin),
                            shard_view(s, buffer, what, u, some));
        } else if (count > 0 && r == s->index) {
            send(s, shard_view(s, buffer, what, u, some));
        } else if (count > 0 && s->index == 0) {
            comm_recv_host(s->group, whole + (some.begin - elements.begin), count * sizeof *whole,
                           r);
        }
    }
}

// ---- parameters --------------------------------------------------------------------------------

static void gather_begin(struct shard *s, const struct tensor *params, int w) {
    struct wrap *wrap = &s->wraps[w];
    if (!tensor_exists(wrap->gathered)) {
        wrap->gathered = tensor_alloc(wrap->size, 1, DTYPE_F32, MEM_COMM);
        wrap->gather =
            comm_all_gather(s->group, wrap->gathered, wrap_part(s, params, MEM_PARAMS, w));
    }
}

static void gathered_free(struct wrap *wrap) {
    comm_wait(wrap->gather);
    wrap->gather = (struct comm_handle){0};
    tensor_free(&wrap->gathered);
}

// Frees what an earlier pass has left, such as the last unit of an evaluation.
static void gathered_trim(struct shard *s, int w, int towards) {
    for (int i = 0; i < s->wrap_count && !s->config->keep_gathered; i++) {
        int ahead = (i - w) * towards;
        if (ahead < 0 || ahead > s->config->prefetch) {
            gathered_free(&s->wraps[i]);
        }
    }
}

struct tensor shard_gather(struct shard *s, const struct tensor *params, int u, int towards) {
    int w = s->wrap_of[u];
    struct wrap *wrap = &s->wraps[w];
    if (s->level == LEVEL_PARAMETERS) {
        gathered_trim(s, w, towards);
        for (int k = 0; k <= s->config->prefetch; k++) {
            int next = w + towards * k;
            if (next >= 0 && next < s->wrap_count) {
                gather_begin(s, params, next);
            }
        }
    }
    trace_begin("wait for parameters", u);
    comm_wait(wrap->gather);
    wrap->gather = (struct comm_handle){0};
    trace_end();
    if (s->level < LEVEL_PARAMETERS) {
        return params[u];
    }
    return tensor_view(wrap->gathered, s->offset[u], s->sizes[u], 1);
}

void shard_release(struct shard *s, int u, int towards) {
    int next = u + towards;
    bool turns = next < 0 || next == s->units; // this unit is needed again at once
    bool kept = towards > 0 && s->config->keep_gathered;
    if (!turns && !kept && s->wrap_of[next] != s->wrap_of[u]) {
        gathered_free(&s->wraps[s->wrap_of[u]]);
    }
}

void shard_params_changed(struct shard *s, struct tensor *params) {
    for (int w = 0; w < s->wrap_count; w++) {
        if (s->level == LEVEL_PARAMETERS) {
            gathered_free(&s->wraps[w]);
        } else if (s->level > LEVEL_NONE) {
            s->wraps[w].gather = comm_all_gather(s->group, wrap_whole(s, params, w),
                                                 wrap_part(s, params, MEM_PARAMS, w));
        }
    }
}

// ---- gradients ---------------------------------------------------------------------------------

bool shard_reduces_fresh(const struct shard *s) {
    return s->level >= LEVEL_GRADIENTS && !s->config->no_sync;
}

struct tensor shard_fresh(struct shard *s, int u) {
    const struct wrap *wrap = &s->wraps[s->wrap_of[u]];
    if (!shard_reduces_fresh(s)) {
        return tensor_alloc(s->sizes[u], 1, DTYPE_F32, MEM_COMM);
    }
    if (!tensor_exists(s->fresh)) {
        size_t used = s->offset[wrap->last - 1] + s->sizes[wrap->last - 1];
        s->fresh = tensor_alloc(wrap->size, 1, DTYPE_F32, MEM_COMM);
        ops_zero(tensor_view(s->fresh, used, wrap->size - used, 1));
    }
    return tensor_view(s->fresh, s->offset[u], s->sizes[u], 1);
}

// Sums this rank's part over the groups of ranks, too.
static void reduce_replicas(struct shard *s, struct wrap *wrap, struct tensor part) {
    if (s->replicas.size > 1) {
        wrap->reduction = comm_all_reduce(s->replicas, part, COMM_SUM);
    }
}

// Ends the reduction of fresh gradients that is under way.
static void reduce_finish(struct shard *s, struct tensor *grads) {
    struct wrap *wrap = s->reducing;
    if (wrap == NULL) {
        return;
    }
    struct tensor part = wrap_part(s, grads, MEM_GRADS, (int)(wrap - s->wraps));
    trace_begin("wait for gradients", wrap->first);
    comm_wait(wrap->reduction);
    trace_end();
    tensor_free(&s->reduced);
    if (tensor_exists(s->sum)) {
        ops_add(part, s->sum);
        tensor_free(&s->sum);
    }
    if (s->last) {
        reduce_replicas(s, wrap, part);
    }
    s->reducing = NULL;
}

void shard_reduce(struct shard *s, struct tensor *grads, int u, bool first, bool last) {
    int w = s->wrap_of[u];
    if (u > s->wraps[w].first) {
        return; // more of the wrap will come
    }
    reduce_finish(s, grads);
    struct tensor part = wrap_part(s, grads, MEM_GRADS, w);
    s->reducing = &s->wraps[w];
    s->reduced = s->fresh;
    s->fresh = (struct tensor){0};
    s->last = last;
    if (!first) {
        s->sum = tensor_alloc(part.rows, 1, DTYPE_F32, MEM_COMM);
        part = s->sum;
    }
    s->wraps[w].reduction = comm_reduce_scatter(s->group, part, s->reduced);
}

void shard_reduce_whole(struct shard *s, struct tensor *grads, int u) {
    int w = s->wrap_of[u];
    if (s->level == LEVEL_NONE || u > s->wraps[w].first) {
        return;
    }
    struct tensor part = wrap_part(s, grads, MEM_GRADS, w);
    s->wraps[w].reduction = comm_reduce_scatter(s->group, part, wrap_whole(s, grads, w));
    reduce_replicas(s, &s->wraps[w], part); // behind it, on the same stream
}

void shard_reduce_wait(struct shard *s, struct tensor *grads) {
    reduce_finish(s, grads);
    trace_begin("wait for gradients", -1);
    for (int w = 0; w < s->wrap_count; w++) {
        comm_wait(s->wraps[w].reduction);
        s->wraps[w].reduction = (struct comm_handle){0};
    }
    trace_end();
}
