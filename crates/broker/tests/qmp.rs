// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The QMP client against servers that misbehave.

use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use serde_json::json;
use tombolo_broker::host::qmp::{Error, Qmp};

const GREETING: &str = "{\"QMP\": {}}\r\n{\"return\": {}, \"id\": 1}\r\n";

/// Starts a server that does `then` once it has sent `lines`.
fn serve(
    lines: &'static str,
    then: impl FnOnce(&mut UnixStream) + Send + 'static,
) -> (tempfile::TempDir, JoinHandle<()>) {
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("qmp")).unwrap();
    let server = std::thread::spawn(move || {
        let (mut client, _) = listener.accept().unwrap();
        client.write_all(lines.as_bytes()).unwrap();
        then(&mut client);
    });
    (folder, server)
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Waits until the client closes.
fn wait(client: &mut UnixStream) {
    let _ = client.read_to_end(&mut Vec::new());
}

fn query(folder: &tempfile::TempDir) -> Result<serde_json::Value, Error> {
    run(async {
        let mut qmp = Qmp::connect(&folder.path().join("qmp"), None).await?;
        qmp.execute("query-status", json!({}), None).await
    })
}

#[test]
fn b10_socket_where_somebody_else_listens_is_told_nothing() {
    let test = "b10_socket_where_somebody_else_listens_is_told_nothing";
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs root): only root can become somebody else");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("qmp");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(folder.path(), open).unwrap();
    let place = path.clone();
    let server = std::thread::spawn(move || {
        let user = rustix::fs::Uid::from_raw(12345);
        rustix::thread::set_thread_res_uid(user, user, user).unwrap();
        let listener = UnixListener::bind(place).unwrap();
        let mut heard = Vec::new();
        for _ in 0..2 {
            let (mut client, _) = listener.accept().unwrap();
            let _ = client.write_all(GREETING.as_bytes());
            let mut said = Vec::new();
            let _ = client.read_to_end(&mut said);
            heard.push(said.len());
        }
        heard
    });
    let connect = |user| run(Qmp::connect(&path, user));
    let refused = loop {
        match connect(Some(54321)) {
            Err(Error::Lost(error)) if error.kind() != std::io::ErrorKind::PermissionDenied => std::thread::yield_now(),
            other => break other.map(drop).unwrap_err().to_string(),
        }
    };
    assert!(refused.contains("user 12345 listens there"), "{refused}");
    connect(Some(12345)).map(drop).unwrap();
    let heard = server.join().unwrap();
    assert!(heard[0] == 0 && heard[1] != 0, "{heard:?}");
}

#[test]
fn answers_and_events_are_told_apart_and_late_answers_dropped() {
    const LINES: &str = "{\"QMP\": {}}\r\n{\"return\": {}, \"id\": 1}\r\n{\"event\": \"STOP\", \"data\": {}}\r\n\
                         {\"return\": 0, \"id\": 77}\r\n{\"return\": {\"status\": \"paused\"}, \"id\": 2}\r\n";
    let (folder, server) = serve(LINES, wait);
    run(async {
        let mut qmp = Qmp::connect(&folder.path().join("qmp"), None).await.unwrap();
        let status = qmp.execute("query-status", json!({}), None).await.unwrap();
        assert_eq!(status["status"], "paused");
        assert_eq!(qmp.event().await.unwrap().name, "STOP");
    });
    server.join().unwrap();
}

#[test]
fn refusal_is_told_with_its_reason() {
    const LINES: &str =
        "{\"QMP\": {}}\r\n{\"return\": {}, \"id\": 1}\r\n{\"error\": {\"desc\": \"no\"}, \"id\": 2}\r\n";
    let (folder, server) = serve(LINES, wait);
    assert_eq!(query(&folder).unwrap_err().to_string(), "QEMU refuses query-status: no");
    server.join().unwrap();
}

#[test]
fn server_that_says_nothing_costs_the_deadline() {
    let (folder, server) = serve(GREETING, wait);
    let began = Instant::now();
    assert!(matches!(query(&folder), Err(Error::Lost(error)) if error.kind() == std::io::ErrorKind::TimedOut));
    assert!((Duration::from_secs(9)..Duration::from_secs(60)).contains(&began.elapsed()));
    server.join().unwrap();
}

/// Returns the number of bytes of memory that this process uses.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

#[test]
fn events_that_wait_take_little_memory_whatever_is_in_them() {
    let (folder, server) = serve(GREETING, |client| {
        let event = format!("{{\"event\": \"STOP\", \"data\": \"{}\"}}\r\n", "x".repeat(1 << 20));
        let long = format!("{{\"event\": \"{}\", \"data\": 0}}\r\n", "x".repeat(1 << 20));
        for _ in 0..48 {
            client.write_all(event.as_bytes()).unwrap();
            client.write_all(long.as_bytes()).unwrap();
        }
        client.write_all(b"{\"return\": {}, \"id\": 2}\r\n").unwrap();
        wait(client);
    });
    run(async {
        let mut qmp = Qmp::connect(&folder.path().join("qmp"), None).await.unwrap();
        let before = resident();
        qmp.execute("query-status", json!({}), None).await.unwrap();
        assert!(resident() < before + (40 << 20), "{before} became {}", resident());
        for _ in 0..48 {
            assert_eq!(qmp.event().await.unwrap().name, "STOP");
        }
    });
    server.join().unwrap();
}

#[test]
fn garbage_endless_lines_and_endless_events_end_the_connection() {
    let (folder, server) = serve("no json\r\n", wait);
    assert!(matches!(query(&folder), Err(Error::Lost(_))));
    server.join().unwrap();
    for flood in ["x", "{\"event\": \"RTC_CHANGE\", \"data\": {}}\r\n"] {
        let (folder, server) = serve(GREETING, move |client| {
            let chunk = flood.repeat(1000);
            while client.write_all(chunk.as_bytes()).is_ok() {}
        });
        let error = query(&folder).unwrap_err().to_string();
        assert!(error.contains("a line of more than") || error.contains("more events than"), "{error}");
        server.join().unwrap();
    }
}
