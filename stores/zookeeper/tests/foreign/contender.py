"""kazoo's own lock, told what to do line by line. It is told to take our nodes for contenders too."""

import sys
import threading
import time

from kazoo.client import KazooClient

server, path, counter = sys.argv[1:4]


def lock(client):
    return client.Lock(path, extra_lock_patterns=("-lock-",))


def open_client():
    client = KazooClient(hosts=server, timeout=4)
    client.start()
    return client


def count(rounds):
    client = open_client()
    mutex = lock(client)
    for _ in range(rounds):
        with mutex:
            with open(counter) as file:
                n = int(file.read())
            time.sleep(0.002)
            with open(counter, "w") as file:
                file.write(str(n + 1))
    client.stop()


def count_in_threads(rounds):
    threads = [threading.Thread(target=count, args=(rounds,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


client, mutex = None, None
print("ready", flush=True)
for order in sys.stdin:
    match order.split():
        case ["count", rounds]:
            count_in_threads(int(rounds))
            print("counted", flush=True)
        case ["acquire"]:
            client = client or open_client()
            # A new one each time: one whose node was taken away by somebody else does not notice.
            mutex = lock(client)
            mutex.acquire()
            print("acquired", flush=True)
        case ["release"]:
            mutex.release()
            print("released", flush=True)
