#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Unmodified programs over plain TCP and under `tombolo run`, side by side, between two network namespaces.

    tools/sockets.py [--runs N] [--seconds N] [--burners N] [ROW...]

Without rows it is the demonstration (iperf3 and Redis); `all` is everything, `list` says what there is. Each row runs
plain and under Tombolo in turn, on the machine as it is and beside programs that burn CPU time (`--burners`, 4; 0 leaves
that out). It prints the medians, their spread and the ratio. Needs root, or user namespaces."""

import argparse, json, os, re, shutil, statistics, subprocess, sys, tempfile, time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HOST = "10.78.0.1"
ROWS = {}


def row(name, unit, *needs, less=False):
    """Registers a measurement: more is better, or `less` is."""
    return lambda function: ROWS.setdefault(name, (function, unit, needs, less)) and function


class World:
    """Two namespaces with a pair of virtual Ethernet devices between them, and a folder for both."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.folder = tempfile.mkdtemp(prefix="tombolo-demo-")
        self.ends = [f"tombolo-demo-{os.getpid()}{end}" for end in "ab"]
        a, b = self.ends
        for step in (
            f"netns add {a}", f"netns add {b}",
            f"link add v0 netns {a} type veth peer name v1 netns {b}",
            f"-n {a} addr add {HOST}/24 dev v0", f"-n {b} addr add 10.78.0.2/24 dev v1",
            f"-n {a} link set v0 up", f"-n {b} link set v1 up",
            f"-n {a} link set lo up", f"-n {b} link set lo up",
        ):
            subprocess.run(["ip"] + step.split(), check=True)
        os.mkdir(self.path("meet"), 0o700)
        os.mkdir(self.path("www"))
        for name, size in (("small", 1304), ("large", 3 << 20)):
            with open(self.path("www/" + name), "wb") as file:
                file.write(os.urandom(size))

    def close(self):
        for end in self.ends:
            pids = subprocess.run(["ip", "netns", "pids", end], capture_output=True, text=True).stdout.split()
            for pid in pids:
                os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "del", end])
        shutil.rmtree(self.folder)

    def path(self, name):
        return os.path.join(self.folder, name)

    def words(self, end, dressed, command):
        run = [f"{ROOT}/target/release/tombolo", "run", "--folder", self.path("meet"), "--"] if dressed else []
        return ["ip", "netns", "exec", self.ends[end]] + run + [str(word) for word in command]

    def serve(self, dressed, port, *command):
        null = subprocess.DEVNULL
        server = subprocess.Popen(self.words(0, dressed, command), stdin=null, stdout=null, stderr=null)
        wanted = re.compile(rf":{port:04X} [0-9A-F:]+ 0A ")
        for _ in range(2000):
            look = ["ip", "netns", "exec", self.ends[0], "cat", "/proc/net/tcp", "/proc/net/tcp6"]
            if wanted.search(subprocess.run(look, capture_output=True, text=True).stdout):
                return server
            time.sleep(0.005)
        raise SystemExit(f"{command[0]} does not listen")

    def start(self, dressed, *command):
        return subprocess.Popen(self.words(1, dressed, command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ask(self, dressed, *command):
        client = self.start(dressed, *command)
        said = client.communicate(timeout=300)[0]
        if client.returncode:
            raise SystemExit(f"{command}: {said}")
        return said


def stop(server):
    server.terminate()
    server.wait()


def found(pattern, text):
    match = re.search(pattern, text)
    if not match:
        raise SystemExit(f"no {pattern!r} in:\n{text}")
    return float(match.group(1))


# ---- each takes the world, and which of server and client run under Tombolo


def iperf3(world, ends, pairs=1, *options):
    servers = [world.serve(ends[0], 5201 + n, "iperf3", "-s", "-1", "-p", 5201 + n) for n in range(pairs)]
    command = ("iperf3", "-c", HOST, "-t", world.seconds, "--json") + options
    clients = [world.start(ends[1], *command, "-p", 5201 + n) for n in range(pairs)]
    said = [client.communicate(timeout=300)[0] for client in clients]
    for server in servers:
        server.wait()
    return sum(json.loads(one)["end"]["sum_received"]["bits_per_second"] for one in said) / 1e9


@row("iperf3", "Gb/s", "iperf3")
def iperf3_one(world, ends):
    return iperf3(world, ends)


@row("iperf3-8", "Gb/s", "iperf3")
def iperf3_eight(world, ends):
    return iperf3(world, ends, 1, "-P", "8")


@row("iperf3-pairs", "Gb/s", "iperf3")
def iperf3_pairs(world, ends):
    return iperf3(world, ends, 6)


def redis(world, ends, test, *options):
    server = world.serve(ends[0], 6379, "redis-server", "--bind", HOST, "--save", "", "--protected-mode", "no", "--dir", world.folder)
    count = 1000
    command = ("redis-benchmark", "-h", HOST, "-c", 50, "-t", test, "--csv") + options
    # As many requests as take the time that is given. The start of the client is not counted: it is long on a busy
    # machine, and a few requests would measure how connections begin.
    while True:
        said = world.ask(ends[1], *command, "-n", count)
        rate = found(r'"%s[^"]*","([0-9.]+)"' % test.upper(), said)
        took = count / rate
        if took > world.seconds / 2:
            break
        count = int(count * min(20, 1.2 * world.seconds / took))
    stop(server)
    return rate / 1000


@row("redis-get", "k requests/s", "redis-server", "redis-benchmark")
def redis_get(world, ends):
    return redis(world, ends, "get")


@row("redis-set", "k requests/s", "redis-server", "redis-benchmark")
def redis_set(world, ends):
    return redis(world, ends, "set")


@row("redis-get-16", "k requests/s", "redis-server", "redis-benchmark")
def redis_get_pipelined(world, ends):
    return redis(world, ends, "get", "-P", 16)


@row("redis-set-16", "k requests/s", "redis-server", "redis-benchmark")
def redis_set_pipelined(world, ends):
    return redis(world, ends, "set", "-P", 16)


def wrk(world, ends, file, connections, *options):
    with open(world.path("nginx.conf"), "w") as configuration:
        configuration.write(
            f"daemon off; user root; worker_processes 1; pid {world.path('pid')}; error_log /dev/null; events {{ }}\n"
            f"http {{ access_log off; sendfile on; keepalive_requests 100000000; "
            f"server {{ listen {HOST}:8080; root {world.path('www')}; }} }}\n"
        )
    server = world.serve(ends[0], 8080, "nginx", "-c", world.path("nginx.conf"), "-p", world.folder)
    url = f"http://{HOST}:8080/{file}"
    said = world.ask(ends[1], "wrk", "-t", 1, "-c", connections, "-d", world.seconds, *options, url)
    stop(server)
    return found(r"Requests/sec: *([0-9.]+)", said) / 1000


@row("nginx", "k requests/s", "nginx", "wrk")
def nginx_small(world, ends):
    return wrk(world, ends, "small", 64)


@row("nginx-large", "k requests/s", "nginx", "wrk")
def nginx_large(world, ends):
    return wrk(world, ends, "large", 4)


@row("nginx-close", "k requests/s", "nginx", "wrk")
def nginx_close(world, ends):
    return wrk(world, ends, "small", 64, "-H", "Connection: close")


def sockperf(world, ends, pairs, *options):
    ports = range(11111, 11111 + pairs)
    servers = [world.serve(ends[0], port, "sockperf", "server", "--tcp", "-i", HOST, "-p", port) for port in ports]
    command = ("sockperf", "ping-pong", "--tcp", "-i", HOST, "-t", world.seconds, "-m", 64) + options
    clients = [world.start(ends[1], *command, "-p", port) for port in ports]
    said = [client.communicate(timeout=300)[0] for client in clients]
    for server in servers:
        stop(server)
    return statistics.mean(found(r"percentile 50\.0+ *= *([0-9.]+)", one) for one in said)


@row("sockperf", "us p50", "sockperf", less=True)
def sockperf_busy(world, ends):
    return sockperf(world, ends, 1, "--mps=400000")


@row("sockperf-rare", "us p50", "sockperf", less=True)
def sockperf_rare(world, ends):
    return sockperf(world, ends, 1, "--mps=1000")


@row("sockperf-pairs", "us p50", "sockperf", less=True)
def sockperf_pairs(world, ends):
    return sockperf(world, ends, 6, "--mps=400000")


# ---- what a program pays whose peer runs without


@row("redis-get alone", "k requests/s", "redis-server", "redis-benchmark")
def redis_alone(world, ends):
    return redis(world, [ends[0], False], "get")


@row("nginx alone", "k requests/s", "nginx", "wrk")
def nginx_alone(world, ends):
    return wrk(world, [ends[0], False], "small", 64)


@row("iperf3 alone", "Gb/s", "iperf3")
def iperf3_alone(world, ends):
    return iperf3(world, [False, ends[1]])


class Burners:
    """Programs that compute without end, while this is open."""

    def __init__(self, count):
        self.count = count

    def __enter__(self):
        self.started = [subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(self.count)]

    def __exit__(self, *_):
        for one in self.started:
            one.kill()
            one.wait()


def measure(world, name, runs, burners):
    """A row's medians, range and ratio beside so many burners, as cells."""
    function, _, _, less = ROWS[name]
    both = [[], []]
    with Burners(burners):
        for _ in range(runs):
            for dressed in (False, True):
                both[dressed].append(function(world, [dressed, dressed]))
    plain, with_it = map(statistics.median, both)
    cells = "".join(f"{statistics.median(one):9.2f} {min(one):.4g}-{max(one):.4g}".rjust(22) for one in both)
    return f"{cells}  {plain / with_it if less else with_it / plain:6.2f}"


DEMO = ["iperf3", "iperf3-8", "redis-get", "redis-set", "redis-get-16"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--burners", type=int, default=4)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    arguments = parser.parse_args()
    if arguments.rows == ["list"]:
        return print("\n".join(ROWS))
    if os.geteuid() != 0:
        # In namespaces of our own we are root.
        again = "mount -t tmpfs tombolo /run && exec \"$0\" \"$@\""
        os.execvp("unshare", ["unshare", "-rmn", "sh", "-c", again, sys.executable] + sys.argv)
    rows = {(): DEMO, ("all",): list(ROWS)}.get(tuple(arguments.rows), arguments.rows)
    world = World(arguments.seconds)
    try:
        states = [("as the machine is", 0)] + [(f"beside {arguments.burners} burners", arguments.burners)] * (arguments.burners > 0)
        print(f"{arguments.runs} runs each, median and range\n{'':18}" + "".join(f"{title:>52}" for title, _ in states))
        print(f"{'':18}" + f"{'plain TCP':>22}{'tombolo run':>22}   ratio" * len(states))
        for name in rows:
            _, unit, needs, _ = ROWS[name]
            missing = [program for program in needs if not shutil.which(program)]
            if missing:
                print(f"{name:18}SKIP: {missing[0]} is not installed")
                continue
            print(f"{name:18}", end="", flush=True)
            for _, burners in states:
                print(measure(world, name, arguments.runs, burners), end="", flush=True)
            print(f"   {unit}")
    finally:
        world.close()


main()
