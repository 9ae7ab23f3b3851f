// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Real programs from Debian's packages between two network namespaces, unmodified. Their data is right, and where a
//! program is listed as accelerated, at least 95 % of its received bytes came through shared memory. The canary runs
//! all of them with a library that does nothing: the data is right, and each misses that share.

#[macro_use]
mod place;

use std::{fs, process::Stdio};

use place::{
    LONG, Place, SERVER, Started, random_file,
    world::{CLIENTS, SERVERS, World, echo, interpreter, number_after, script},
};

// ---- each asserts that the data is right, and returns how many bytes must have been received

fn redis(world: &World) -> u64 {
    let folder = world.text("");
    let server =
        ["redis-server", "--port", "6379", "--bind", SERVER, "--protected-mode", "no", "--save", "", "--dir", &folder];
    let mut server = world.serve(6379, &server);
    let checked = world.ask(&[&interpreter(), &script("redis.py"), SERVER, "6379", "400"]);
    let mut payload = number_after(&checked, "bytes:");
    let count = if cfg!(debug_assertions) { "20000" } else { "100000" };
    for pipeline in ["1", "16"] {
        let words = ["redis-benchmark", "-h", SERVER, "-c", "50", "-t", "set,get", "-d", "256", "-P", pipeline];
        world.ask(&[&words[..], &["-n", count, "-q"]].concat());
        payload += 2 * 256 * count.parse::<u64>().unwrap();
    }
    server.terminate();
    payload
}

fn nginx(world: &World) -> u64 {
    let www = world.place.path("www");
    fs::create_dir(&www).unwrap();
    let small: Vec<u8> = random_file(&www.join("small"), 1304);
    random_file(&www.join("large"), 3 << 20);
    let configuration =
        world.file("nginx.conf", &nginx_configuration(&world.text("www"), &world.text("nginx.pid"), ""));
    let mut server = world.serve(8080, &["nginx", "-c", &configuration, "-p", &world.text("")]);
    let mut payload = 0;
    for (file, connections, len) in [("small", "64", small.len() as u64), ("large", "4", 3 << 20)] {
        let url = format!("http://{SERVER}:8080/{file}");
        let kept = world.text(&format!("www/{file}"));
        let words = ["wrk", "-t2", "-c", connections, "-d4", "-s", &script("whole.lua"), &url, "--", &kept];
        let said = world.ask(&words);
        assert_eq!(number_after(&said, "wrong answers:"), 0, "{said}");
        let answers = number_after(&said, "right answers:");
        // More than none; the rate depends on the machine.
        assert!(answers > 20, "{said}");
        payload += answers * len;
    }
    server.terminate();
    payload
}

fn nginx_configuration(www: &str, pid: &str, more: &str) -> String {
    format!(
        "daemon off; user root; worker_processes 2; pid {pid}; error_log stderr; events {{ worker_connections 1024; }}\n\
         http {{ access_log off; sendfile on; keepalive_requests 100000000; server {{ listen {SERVER}:8080 {more}; \
         root {www}; }} }}\n"
    )
}

fn memcached(world: &World) -> u64 {
    let mut server = world.serve(11211, &["memcached", "-u", "root", "-l", SERVER, "-t", "2", "-m", "256"]);
    let checked = world.ask(&[&interpreter(), &script("memcached.py"), SERVER, "11211", "600"]);
    server.terminate();
    number_after(&checked, "bytes:")
}

/// Twenty sensors in one domain; a broker and a subscriber in the other.
fn mosquitto(world: &World) -> u64 {
    const SENSORS: usize = 20;
    const READINGS: usize = 1000;
    let text = format!("listener 1883 {SERVER}\nallow_anonymous true\nmax_queued_messages 0\nuser root\n");
    let configuration = world.file("mosquitto.conf", &text);
    let mut broker = world.serve(1883, &["mosquitto", "-c", &configuration]);
    let heard = world.place.path("heard");
    let count = (SENSORS * READINGS).to_string();
    let words = ["mosquitto_sub", "-h", SERVER, "-t", "sensors/#", "-q", "1", "-i", "hub", "-c"];
    // The broker has the subscription before any sensor publishes.
    assert!(Started::new(world.command(SERVERS, &words).arg("-E")).finish().success());
    let mut subscriber = world.command(SERVERS, &words);
    subscriber.args(["-C", &count]).stdout(fs::File::create(&heard).unwrap());
    let mut subscriber = Started::new(&mut subscriber);
    let mut said = Vec::new();
    let mut sensors: Vec<_> = (0..SENSORS)
        .map(|sensor| {
            let readings: Vec<_> =
                (0..READINGS).map(|n| format!("{sensor} {n} {}", "x".repeat(2000 + n % 97))).collect();
            let text = readings.join("\n") + "\n";
            let file = world.file(&format!("sensor{sensor}"), &text);
            said.extend(readings);
            let topic = format!("sensors/{sensor}");
            let mut command = world.command(CLIENTS, &["mosquitto_pub", "-h", SERVER, "-t", &topic, "-q", "1", "-l"]);
            Started::with_input(&mut command, &file)
        })
        .collect();
    for sensor in &mut sensors {
        assert!(sensor.finish().success());
    }
    assert!(subscriber.finish().success());
    broker.terminate();
    let text = fs::read_to_string(&heard).unwrap();
    let mut heard: Vec<_> = text.lines().collect();
    heard.sort_unstable();
    said.sort_unstable();
    assert!(heard == said, "{} of {} readings, or not the same", heard.len(), said.len());
    2 * said.iter().map(|line| line.len() as u64).sum::<u64>()
}

fn sockperf(world: &World) -> u64 {
    let mut server = world.serve(11111, &["sockperf", "server", "--tcp", "-i", SERVER, "-p", "11111"]);
    let words = ["sockperf", "ping-pong", "--tcp", "-i", SERVER, "-p", "11111", "-t", "4", "-m", "1000"];
    // Beyond 600,000 round trips a second sockperf loses its count.
    let said = world.ask(&[&words[..], &["--mps=100000", "--data-integrity"]].concat());
    assert!(!said.contains("ailed"), "{said}");
    server.terminate();
    let answers = number_after(&said, "ReceivedMessages=");
    assert!(answers > 200, "{said}");
    2 * answers * 1000
}

fn iperf3(world: &World) -> u64 {
    let mut payload = 0;
    for (streams, reverse) in [("1", false), ("1", true), ("8", false), ("8", true)] {
        let mut server = world.serve(5201, &["iperf3", "-s", "-1"]);
        let mut words = vec!["iperf3", "-c", SERVER, "-n", "2G", "-P", streams, "--json"];
        words.extend(reverse.then_some("-R"));
        let said: serde_json::Value = serde_json::from_str(&world.ask(&words)).unwrap();
        assert!(server.finish().success());
        payload += said["end"]["sum_received"]["bytes"].as_u64().unwrap();
    }
    payload
}

/// The client leaves the server's first message unread until it ends. On a busy machine it takes a while until all
/// streams are joined, and TCP carries a hundred megabytes or more meanwhile; each stream is long compared with that.
fn iperf2(world: &World) -> u64 {
    let mut payload = 0;
    for streams in ["1", "4"] {
        let mut server = world.serve(5001, &["iperf", "-s"]);
        let said = world.ask(&["iperf", "-c", SERVER, "-n", "2G", "-P", streams, "-y", "C"]);
        server.terminate();
        // The last line is the total; its last field but one is the number of bytes.
        let sum = said.lines().last().and_then(|line| line.split(',').nth(7)?.parse::<u64>().ok());
        payload += sum.unwrap_or_else(|| panic!("{said}"));
    }
    payload
}

fn asyncio(world: &World) -> u64 {
    let words = [&interpreter()[..], &script("streams.py")[..]].map(str::to_owned);
    let words = [&words[0][..], &words[1]];
    echo(world, &words, &words, LONG)
}

fn node(world: &World) -> u64 {
    let script = script("streams.js");
    echo(world, &["node", &script], &["node", &script], LONG)
}

fn grpc(world: &World) -> u64 {
    let mut server = world.serve(50051, &[&interpreter(), &script("grpcs.py"), "serve", SERVER, "50051"]);
    let said = world.ask(&[&interpreter(), &script("grpcs.py"), "ask", SERVER, "50051"]);
    server.terminate();
    2 * number_after(&said, "bytes:")
}

// ---- programs that must only deliver the right data

fn curl_of_nginx(world: &World) {
    let www = world.place.path("www");
    fs::create_dir(&www).unwrap();
    let whole = random_file(&www.join("file"), LONG);
    let (key, certificate) = (world.text("key"), world.text("certificate"));
    let made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=tombolo", "-days", "2"];
    world.ask(&[&made[..], &["-keyout", &key, "-out", &certificate]].concat());
    let tls = format!("; listen {SERVER}:8443 ssl; ssl_certificate {certificate}; ssl_certificate_key {key}");
    let configuration = nginx_configuration(&world.text("www"), &world.text("nginx.pid"), &tls);
    let configuration = world.file("nginx.conf", &configuration);
    let mut server = world.serve(8443, &["nginx", "-c", &configuration, "-p", &world.text("")]);
    for url in [format!("http://{SERVER}:8080/file"), format!("https://{SERVER}:8443/file")] {
        let to = world.text("fetched");
        // Twice over one connection, then over many short ones.
        world.ask(&["curl", "-sfk", "--http1.1", &url, &url, "-o", &to, "-o", &to]);
        assert!(fs::read(&to).unwrap() == whole, "{url} differs");
        for _ in 0..20 {
            world.ask(&["curl", "-sfk", "-r", "1000-1999", &url, "-o", &to]);
            assert!(fs::read(&to).unwrap() == whole[1000..2000], "a part of {url} differs");
        }
    }
    server.terminate();
}

fn redis_cli(world: &World) {
    let server = ["redis-server", "--port", "6379", "--bind", SERVER, "--protected-mode", "no", "--save", ""];
    let mut server = world.serve(6379, &server);
    let value = random_file(&world.place.path("value"), 16 << 20);
    let client = ["redis-cli", "-h", SERVER, "--raw"];
    let mut put = world.command(CLIENTS, &[&client[..], &["-x", "set", "key"]].concat());
    assert!(Started::with_input(put.stdout(Stdio::null()), &world.text("value")).finish().success());
    let mut get = world.command(CLIENTS, &[&client[..], &["get", "key"]].concat());
    let to = fs::File::create(world.place.path("got")).unwrap();
    assert!(Started::new(get.stdout(to)).finish().success());
    let got = fs::read(world.place.path("got")).unwrap();
    assert!(got[..got.len() - 1] == value, "{} of {} bytes, or not the same", got.len(), value.len());
    server.terminate();
}

correct! {
    curl_of_nginx_with_and_without_tls_gets_the_file, ["nginx", "curl", "openssl"], curl_of_nginx;
    redis_cli_gets_what_it_has_put, ["redis-server", "redis-cli"], redis_cli;
}

accelerated! {
    redis_goes_through_shared_memory, ["redis-server", "redis-benchmark"], redis;
    nginx_and_wrk_go_through_shared_memory, ["nginx", "wrk"], nginx;
    memcached_goes_through_shared_memory, ["memcached"], memcached;
    mosquitto_with_twenty_publishers_goes_through_shared_memory, ["mosquitto", "mosquitto_pub"], mosquitto;
    sockperf_goes_through_shared_memory, ["sockperf"], sockperf;
    iperf3_of_one_and_eight_streams_goes_through_shared_memory, ["iperf3"], iperf3;
    iperf_of_one_and_four_streams_goes_through_shared_memory, ["iperf"], iperf2;
    asyncio_goes_through_shared_memory, [], asyncio;
    node_goes_through_shared_memory, ["node"], node;
    grpc_goes_through_shared_memory, ["/usr/lib/python3/dist-packages/grpc/__init__.py"], grpc;
}
