/* Gives a test a real fork(2), which Rust offers to nobody who forbids `unsafe`: chdir to "/lockkeeper-fork" forks. It succeeds in
 * the child and fails with ENOENT in the parent, as it would without this shim. Every other chdir is passed on. */
#include <errno.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int chdir(const char *path) {
    if (strcmp(path, "/lockkeeper-fork") != 0)
        return (int)syscall(SYS_chdir, path);
    if (fork() == 0)
        return 0;
    errno = ENOENT;
    return -1;
}
