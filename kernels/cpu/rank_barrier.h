/* A barrier of the ranks of a host, in memory that they share. Included once. */

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define STRIDE 16  /* numbers between two counters, so that each has a cache line */
#define SPINS 4000 /* reads before the thread sleeps, some 100 us */

static long futex(uint32_t *word, int operation, uint32_t value, const struct timespec *timeout) {
    return syscall(SYS_futex, word, operation, value, timeout, NULL, 0);
}

/* Arrives at barrier `number`, counted from 1, and waits for the other ranks. `arrived` has a counter for each rank. Returns
   1 when all have come, and 0 after a second: call it again. */
int64_t rank_barrier(uint32_t *arrived, int64_t rank, int64_t ranks, uint32_t number) {
    const struct timespec second = {1, 0};
    uint32_t *own = arrived + rank * STRIDE;
    __atomic_store_n(own, number, __ATOMIC_SEQ_CST);
    futex(own, FUTEX_WAKE, INT_MAX, NULL);
    for (int64_t r = 0; r < ranks; r++) {
        uint32_t *other = arrived + r * STRIDE, seen;
        for (int64_t spins = 0; (int32_t)((seen = __atomic_load_n(other, __ATOMIC_ACQUIRE)) - number) < 0; spins++) {
            if (spins < SPINS) {
#if defined(__x86_64__)
                __builtin_ia32_pause();
#endif
            } else if (futex(other, FUTEX_WAIT, seen, &second) && errno == ETIMEDOUT) {
                return 0;
            }
        }
    }
    return 1;
}
