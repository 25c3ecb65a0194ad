/* Moves the wall clock of one process: every way to ask for it adds an offset, which a test writes to a file.
 * Clocks that count from the boot stay as they are: these cannot be set in the real world either. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND INT64_C(1000000000)

static const int64_t zero;
static const int64_t *offset = &zero;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("LOCKKEEPER_CLOCK_OFFSET");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(NULL, sizeof zero, PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0)
        close(file);
    if (page == MAP_FAILED) {
        /* A server that silently kept the true time would pass tests that have tested nothing. */
        perror("clock shim: LOCKKEEPER_CLOCK_OFFSET");
        _exit(70);
    }
    offset = page;
}

int clock_gettime(clockid_t clock, struct timespec *out) {
    /* The call itself, because the function of this name is this one. */
    int failed = (int)syscall(SYS_clock_gettime, clock, out);
    if (failed || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE))
        return failed;
    int64_t now = out->tv_sec * SECOND + out->tv_nsec + __atomic_load_n(offset, __ATOMIC_RELAXED);
    out->tv_sec = now / SECOND;
    out->tv_nsec = now % SECOND;
    return 0;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone) {
    (void)zone;
    struct timespec now;
    int failed = clock_gettime(CLOCK_REALTIME, &now);
    if (!failed) {
        out->tv_sec = now.tv_sec;
        out->tv_usec = now.tv_nsec / 1000;
    }
    return failed;
}

time_t time(time_t *out) {
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now))
        return (time_t)-1;
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}
