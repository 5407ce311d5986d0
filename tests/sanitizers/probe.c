// Is the sanitizer awake? Each argument names one fault that this program then has; "clean" is the
// same work without a fault, so that a false alarm shows too.
//
// ctest: ENVIRONMENT_MODIFICATION OMP_NUM_THREADS=set:4
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { COUNT = 4096 };

// Two loops with a barrier between them, in which every element changes its thread.
static int team_sum(void) {
    static int x[COUNT];
    int sum = 0;
#pragma omp parallel
    {
#pragma omp for
        for (int i = 0; i < COUNT; i++) {
            x[i] = i;
        }
#pragma omp for reduction(+ : sum)
        for (int i = 0; i < COUNT; i++) {
            sum += x[COUNT - 1 - i];
        }
    }
    return sum;
}

static int team_sum_race(void) {
    int sum = 0;
#pragma omp parallel for
    for (int i = 0; i < COUNT; i++) {
        sum += i;
    }
    return sum;
}

static int heap_write(volatile size_t bytes) {
    char *x = malloc(COUNT);
    memset(x, 1, bytes);
    int value = x[COUNT - 1];
    free(x);
    return value;
}

int main(int argc, char **argv) {
    const char *fault = argc > 1 ? argv[1] : "clean";
    volatile int result = team_sum() + heap_write(COUNT);
    if (strcmp(fault, "race") == 0) {
        result = team_sum_race();
    } else if (strcmp(fault, "overflow") == 0) {
        result = heap_write(COUNT + 1);
    } else if (strcmp(fault, "leak") == 0) {
        volatile char *lost = malloc(COUNT);
        lost[0] = 1;
        lost = NULL;
    } else if (strcmp(fault, "shift") == 0) {
        volatile int places = 40;
        result = result << places;
    }
    printf("%s %d\n", fault, result);
    return 0;
}
