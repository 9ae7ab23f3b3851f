// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Unmodified programs with and without the library: the same behaviour, the same bytes, and, by the library's own
//! counters, bytes that went through shared memory.

mod place;

use std::{fs, path::Path};

use place::{LONG, Namespaces, Place, SERVER, Started, has, output, python, random_file};

#[test]
fn semantics_with_the_library_are_those_without() {
    if !has("semantics_with_the_library_are_those_without", &["python3"]) {
        return;
    }
    for (host, after) in [("127.0.0.1", "0"), ("127.0.0.1", "100000000"), ("::1", "0")] {
        let place = Place::new();
        let plain = output(python("semantics.py").arg(host), &place.path("plain"));
        let mut command = python("semantics.py");
        place.dress(&mut command);
        let with = output(command.arg(host).env("TOMBOLO_SOCKETS_AFTER", after), &place.path("with"));
        let differ: Vec<_> = plain.lines().zip(with.lines()).filter(|(plain, with)| plain != with).collect();
        assert!(plain == with, "{host}, joined after {after} bytes: {differ:#?}");
        assert!(place.log().matches("joined").count() > 20, "{}", place.log());
        place.assert_tidy();
    }
}

#[test]
fn s1_s3_streams_that_move_to_and_fro_all_the_time_arrive_whole() {
    if !has("s1_s3_streams_that_move_to_and_fro_all_the_time_arrive_whole", &["python3"]) {
        return;
    }
    for (mode, pace) in [("level", "2000"), ("edge", "2000"), ("level", "300"), ("edge", "300")] {
        let place = Place::new();
        let mut command = python("echo.py");
        place.dress(command.arg(mode).arg("8000000").env("TOMBOLO_SOCKETS_FLIP_US", pace));
        assert_eq!(output(&mut command, &place.path("out")), "4 of 4\n", "{mode}, {pace} us: {}", place.log());
        let (tcp, shared) = place.received();
        assert!(tcp > 1_000_000 && shared > 1_000_000, "{tcp} over TCP, {shared} through shared memory");
        assert!(!place.log().contains("broken"), "{}", place.log());
        place.assert_tidy();
    }
}

#[test]
fn peer_that_is_killed_ends_reading_and_writing() {
    if !has("peer_that_is_killed_ends_reading_and_writing", &["python3"]) {
        return;
    }
    for _ in 0..10 {
        let place = Place::new();
        let mut command = python("killed.py");
        place.dress(&mut command);
        assert_eq!(output(&mut command, &place.path("out")), "reading ends\nwriting ends\n", "{}", place.log());
        assert!(place.received().1 > 0, "{}", place.log());
    }
}

#[test]
fn program_that_waits_takes_no_cpu() {
    if !has("program_that_waits_takes_no_cpu", &["python3"]) {
        return;
    }
    let place = Place::new();
    let mut command = python("idle.py");
    place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0"));
    let said = output(&mut command, &place.path("out"));
    assert!(place.log().matches("joined").count() >= 40, "{}", place.log());
    let ways: Vec<_> = said.lines().map(|line| line.split(' ').collect::<Vec<_>>()).collect();
    assert_eq!(ways.len(), 8, "{said}");
    for way in ways {
        let [name, wakes, cpu] = way[..] else { panic!("{said}") };
        let (wakes, cpu): (u64, u64) = (wakes.parse().unwrap(), cpu.parse().unwrap());
        // Milliseconds within a second are thousandths of a CPU; the beginning and the end of the wait are included.
        let sleeps = wakes <= 100 && cpu <= 50;
        // Canary: the last program polls each millisecond.
        assert_eq!(sleeps, name != "polls", "{name}: woke {wakes} times, {cpu} ms of CPU time; {}", place.log());
    }
}

#[test]
fn echoes_inside_one_process_go_through_shared_memory() {
    if !has("echoes_inside_one_process_go_through_shared_memory", &["python3"]) {
        return;
    }
    let place = Place::new();
    let mut command = python("echo.py");
    place.dress(command.arg("level").arg("200000000"));
    assert_eq!(output(&mut command, &place.path("out")), "4 of 4\n");
    // Bytes that were in socket buffers at the join went over TCP.
    place.shared(1_600_000_000, 90).unwrap();
}

#[test]
fn sendfile_of_asyncio_goes_through_shared_memory() {
    if !has("sendfile_of_asyncio_goes_through_shared_memory", &["python3"]) {
        return;
    }
    let place = Place::new();
    let size = random_file(&place.path("file"), LONG).len() as u64;
    let mut command = python("sendfile.py");
    place.dress(command.arg(place.path("file")).env("TOMBOLO_SOCKETS_AFTER", "0"));
    let said = output(&mut command, &place.path("out"));
    assert_eq!(said, format!("{size} True {size}\n{} True {size}\n", size - size / 2), "{}", place.log());
    place.shared(size + size / 2, 95).unwrap();
}

#[test]
fn loopback_that_is_switched_off_stays_on_tcp() {
    if !has("loopback_that_is_switched_off_stays_on_tcp", &["python3"]) {
        return;
    }
    let place = Place::new();
    let mut command = python("echo.py");
    place.dress(command.arg("level").arg("8000000").env("TOMBOLO_SOCKETS_LOOPBACK", "off"));
    assert_eq!(output(&mut command, &place.path("out")), "4 of 4\n");
    assert_eq!(place.received().1, 0);
    assert!(place.log().contains("switched off"), "{}", place.log());
}

const LEN: usize = 200 << 20;

/// Sends a file from one namespace to the other by socat; `dress` selects which of the two commands has the library.
fn socat(place: &Place, namespaces: &Namespaces, dress: [bool; 2]) {
    let (from, to) = (place.path("from"), place.path("to"));
    let bytes = random_file(&from, LEN);
    let mut server = namespaces.command(0, "socat", &format!("-u TCP-LISTEN:9000 CREATE:{}", to.display()));
    let mut client = namespaces.command(1, "socat", &format!("-u FILE:{} TCP:{SERVER}:9000", from.display()));
    if dress[0] {
        place.dress(&mut server);
    }
    if dress[1] {
        place.dress(&mut client);
    }
    let mut server = Started::new(&mut server);
    namespaces.wait_for(9000);
    assert!(Started::new(&mut client).finish().success());
    assert!(server.finish().success());
    assert!(fs::read(&to).unwrap() == bytes, "the file differs");
}

#[test]
fn socat_between_namespaces_goes_through_shared_memory() {
    let test = "socat_between_namespaces_goes_through_shared_memory";
    let Some(namespaces) = has(test, &["socat", "ip"]).then(|| Namespaces::new(test)).flatten() else { return };
    let place = Place::new();
    socat(&place, &namespaces, [true, true]);
    place.shared(LEN as u64, 95).unwrap();
    place.assert_tidy();
}

#[test]
fn s8_socat_with_the_library_at_one_end_stays_on_tcp() {
    let test = "s8_socat_with_the_library_at_one_end_stays_on_tcp";
    let Some(namespaces) = has(test, &["socat", "ip"]).then(|| Namespaces::new(test)).flatten() else { return };
    for dress in [[true, false], [false, true]] {
        let place = Place::new();
        socat(&place, &namespaces, dress);
        assert_eq!(place.received().1, 0);
        place.assert_tidy();
    }
}

#[test]
fn canary_wrapper_that_does_nothing_fails_the_share() {
    let test = "canary_wrapper_that_does_nothing_fails_the_share";
    let Some(namespaces) = has(test, &["socat", "ip"]).then(|| Namespaces::new(test)).flatten() else { return };
    let place = Place::new();
    socat(&place, &namespaces, [false, false]);
    assert!(place.shared(LEN as u64, 95).is_err());
}

#[test]
fn iperf3_between_namespaces_goes_through_shared_memory_both_ways() {
    let test = "iperf3_between_namespaces_goes_through_shared_memory_both_ways";
    let Some(namespaces) = has(test, &["iperf3", "ip"]).then(|| Namespaces::new(test)).flatten() else { return };
    for reverse in ["", " -R"] {
        let place = Place::new();
        let mut server = namespaces.command(0, "iperf3", "-s -1");
        let mut client = namespaces.command(1, "iperf3", &format!("-c {SERVER} -n 1G{reverse}"));
        place.dress(&mut server);
        place.dress(&mut client);
        let mut server = Started::new(&mut server);
        namespaces.wait_for(5201);
        assert!(Started::new(&mut client).finish().success());
        assert!(server.finish().success());
        place.shared(1 << 30, 95).unwrap();
    }
}

#[test]
fn python_http_between_namespaces_goes_through_shared_memory() {
    let test = "python_http_between_namespaces_goes_through_shared_memory";
    let Some(namespaces) = has(test, &["python3", "ip"]).then(|| Namespaces::new(test)).flatten() else { return };
    let place = Place::new();
    fs::create_dir(place.path("www")).unwrap();
    let bytes = random_file(&place.path("www").join("file"), LEN);
    let python = python("fetch.py").get_program().to_str().unwrap().to_owned();
    let served = place.path("www");
    let arguments = format!("-m http.server 8000 --bind {SERVER} --directory {}", served.display());
    let mut server = namespaces.command(0, &python, &arguments);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/programs/fetch.py");
    let to = place.path("to");
    let arguments = format!("{} http://{SERVER}:8000/file {}", script.display(), to.display());
    let mut client = namespaces.command(1, &python, &arguments);
    place.dress(&mut server);
    place.dress(&mut client);
    let mut server = Started::new(&mut server);
    namespaces.wait_for(8000);
    assert!(Started::new(&mut client).finish().success());
    server.terminate();
    assert!(fs::read(&to).unwrap() == bytes, "the file differs");
    place.shared(LEN as u64, 95).unwrap();
}

#[test]
fn s7_twin_connections_of_isolated_namespaces_keep_their_bytes_apart() {
    let test = "s7_twin_connections_of_isolated_namespaces_keep_their_bytes_apart";
    if !has(test, &["socat", "ip"]) {
        return;
    }
    let Some(twins) = Namespaces::new(test).zip(Namespaces::new(test)) else { return };
    let place = Place::new();
    let twins = [twins.0, twins.1];
    let payloads = [0, 1].map(|n| random_file(&place.path(&format!("from{n}")), LEN / 4 + n * 8));
    // Both pairs have the same addresses and ports, and one folder.
    let mut servers: Vec<_> = (0..2)
        .map(|n| {
            let to = place.path(&format!("to{n}"));
            let mut server = twins[n].command(0, "socat", &format!("-u TCP-LISTEN:9000 CREATE:{}", to.display()));
            place.dress(&mut server);
            Started::new(&mut server)
        })
        .collect();
    twins.iter().for_each(|one| one.wait_for(9000));
    let mut clients: Vec<_> = (0..2)
        .map(|n| {
            let from = place.path(&format!("from{n}"));
            let arguments = format!("-u FILE:{} TCP:{SERVER}:9000,sourceport=4000", from.display());
            let mut client = twins[n].command(1, "socat", &arguments);
            place.dress(&mut client);
            Started::new(&mut client)
        })
        .collect();
    for one in clients.iter_mut().chain(&mut servers) {
        assert!(one.finish().success());
    }
    for (n, payload) in payloads.iter().enumerate() {
        assert!(fs::read(place.path(&format!("to{n}"))).unwrap() == *payload, "twin {n}: {}", place.log());
    }
}
