"""Counts in a file, one by one, under redis-py's lock (or under none, to show what that does).

Usage: foreign.py PORT FILE ROUNDS locked|free. Says "ready", waits for a line, counts, says "done".
"""

import os
import sys
import time

import redis
from redis.lock import Lock


def increment(path, log):
    # As the other side does it: read, give others their turn, write.
    file = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    value = int(os.pread(file, 64, 0) or b"0")
    time.sleep(0.0005)
    os.pwrite(file, b"%020d\n" % (value + 1), 0)
    os.close(file)
    with open(log, "a") as lines:
        lines.write("theirs\n")


def main(port, path, rounds, how):
    client = redis.Redis(port=int(port))
    client.ping()
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(int(rounds)):
        if how == "free":
            increment(path, path + ".log")
            continue
        with Lock(client, "lock:counter", timeout=10, sleep=0.01):
            increment(path, path + ".log")
    print("done", flush=True)


main(*sys.argv[1:])
