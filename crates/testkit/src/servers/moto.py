# moto, one request at a time. It checks a condition and then writes, with nothing in between but Python's habit of letting a
# thread run for 5 ms: two writes that exclude each other were both taken now and then. What others rely on being atomic must be.
import io
import threading

from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.server import main

lock = threading.Lock()
serve = DomainDispatcherApplication.__call__


def one_at_a_time(self, environ, start_response):
    # Read before it is this one's turn: a client that stops in the middle keeps nobody waiting.
    length = environ.get("CONTENT_LENGTH")
    if length:
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(int(length)))
    with lock:
        answer = serve(self, environ, start_response)
        try:
            return list(answer)
        finally:
            if hasattr(answer, "close"):
                answer.close()


DomainDispatcherApplication.__call__ = one_at_a_time
main()
