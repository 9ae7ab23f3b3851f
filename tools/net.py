#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""`make net-demo`: `tombolo net` beside veth, between two network namespaces of this kernel, in one run.

Each round does every row over both, one right after the other, so that what else the machine does meets both alike. Printed
are medians with the least and the most, and the median of the ratios within a round. Needs root, iproute2 and iperf3;
without sockperf or ping their rows are left out. Arguments: rounds (5) and seconds of each sample (2).
"""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
SECONDS = int(sys.argv[2]) if len(sys.argv) > 2 else 2
TOMBOLO = os.path.join(os.environ.get("CARGO_TARGET_DIR", "target"), "release", "tombolo")
NETNS = [f"net-demo-{os.getpid()}-{end}" for end in "ab"]
KINDS = {"veth": "10.78.1", "tombolo net": "10.78.2"}
TICKS = os.sysconf("SC_CLK_TCK")
started = []


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def inside(end, *words):
    return ["ip", "netns", "exec", NETNS[end], *words]


def start(command):
    null = subprocess.DEVNULL
    started.append(subprocess.Popen(command, stdin=null, stdout=null, stderr=null))
    return started[-1]


def output(end, *words):
    done = subprocess.run(inside(end, *words), capture_output=True, text=True, timeout=60 + 4 * SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stdout[-400:]}{done.stderr[-400:]}")
    return done.stdout


def busy():
    """Seconds of CPU that the machine has spent on anything so far."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, irq, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + softirq) / TICKS


def stream(address, streams):
    """MB/s of iperf3, and seconds of CPU for a GB."""
    before = busy()
    end = json.loads(output(0, "iperf3", "-c", address, "-t", str(SECONDS), "-P", str(streams), "-J"))["end"]
    received = end["sum_received"]
    return received["bits_per_second"] / 8e6, (busy() - before) / (received["bytes"] / 1e9)


def pingpong(address, how):
    """Microseconds of a round trip of 64 bytes, the median within the sample."""
    said = output(0, "sockperf", "ping-pong", "-i", address, "-t", str(SECONDS), "-m", "64", *how)
    return 2 * float(re.search(r"percentile 50\.000 =\s+([\d.]+)", said)[1])


def flood(address):
    said = output(0, "ping", "-f", "-q", "-c", "2000", address)
    return 1000 * float(re.search(r"= [\d.]+/([\d.]+)/", said)[1])


def rows(address):
    """Name, whether more is better, and value."""
    for streams in (1, 4):
        speed, cost = stream(address, streams)
        name = f"TCP, {streams} stream" + "s" * (streams > 1)
        yield f"{name}, MB/s", speed
        yield f"{name}, CPU s for a GB", cost
    if shutil.which("sockperf"):
        yield "TCP, 64 B there and back, us", pingpong(address, ["--tcp", "-p", "5301"])
        yield "UDP, 64 B there and back, us", pingpong(address, ["-p", "5302"])
    if shutil.which("ping"):
        yield "ping -f, us", flood(address)


def wait_for(what, condition):
    until = time.monotonic() + 30
    while not condition():
        if time.monotonic() > until:
            sys.exit(f"tombolo: {what}: not within 30 s")
        time.sleep(0.05)


def set_up(folder):
    for netns in NETNS:
        ip("netns", "add", netns)
        ip("-n", netns, "link", "set", "lo", "up")
    ip("link", "add", "va", "netns", NETNS[0], "type", "veth", "peer", "name", "vb", "netns", NETNS[1])
    channel = f"local:{folder}/wire"
    for end, role in enumerate(["--listen", "--connect"]):
        ip("-n", NETNS[end], "addr", "add", f"10.78.1.{end + 1}/24", "dev", "v" + "ab"[end])
        ip("-n", NETNS[end], "link", "set", "v" + "ab"[end], "up")
        start([TOMBOLO, "net", "--folder", f"{folder}/net", "up", "tmb0", role, channel, "--netns", NETNS[end]])
        shown = ["ip", "-n", NETNS[end], "link", "show", "tmb0"]
        wait_for("the interface", lambda: subprocess.run(shown, capture_output=True).returncode == 0)
        ip("-n", NETNS[end], "addr", "add", f"10.78.2.{end + 1}/24", "dev", "tmb0")
    wait_for("the link", lambda: b"LOWER_UP" in subprocess.run(shown, capture_output=True).stdout)
    start(inside(1, "iperf3", "-s"))
    if shutil.which("sockperf"):
        for net in KINDS.values():
            start(inside(1, "sockperf", "server", "--tcp", "-i", f"{net}.2", "-p", "5301"))
            start(inside(1, "sockperf", "server", "-i", f"{net}.2", "-p", "5302"))
    time.sleep(1)


def short(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def show(seen):
    print(f"\n{os.uname().release}, {os.cpu_count()} CPUs, {ROUNDS} rounds of {SECONDS} s, load {os.getloadavg()[0]:.1f} at the end")
    print(f"\n| | {' | '.join(KINDS)} | ratio |\n|---|--:|--:|--:|")
    for name, values in seen.items():
        cells = [f"{short(statistics.median(kind))} ({short(min(kind))} to {short(max(kind))})" for kind in values]
        ratio = statistics.median(ours / theirs for theirs, ours in zip(*values))
        print(f"| {name} | {' | '.join(cells)} | {ratio:.2f} |")


def main():
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("iperf3"):
        sys.exit("tombolo: net-demo needs root, iproute2 and iperf3")
    seen = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            set_up(folder)
            for number in range(ROUNDS):
                print(f"round {number + 1} of {ROUNDS}", file=sys.stderr)
                for at, net in enumerate(KINDS.values()):
                    for name, value in rows(f"{net}.2"):
                        seen.setdefault(name, [[], []])[at].append(value)
        finally:
            for process in started:
                process.send_signal(signal.SIGTERM)
            for process in started:
                process.wait()
            for netns in NETNS:
                subprocess.run(["ip", "netns", "del", netns])
    show(seen)


main()
