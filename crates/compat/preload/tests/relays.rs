// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Programs between a client and a server, all three with the library: bytes that they move by `splice` reach them and
//! leave them through shared memory.

mod place;

use std::fs;

use place::{
    LONG, Place, SERVER, Started, built, random_file,
    world::{CLIENTS, SERVERS, World, interpreter, script},
};

/// Asserts that all of the proxy's connections were joined, and that nearly all bytes to and from the proxy went
/// through shared memory.
fn assert_shared(world: &World, payload: usize) {
    let (tcp, shared) = world.place.received();
    assert!(tcp + shared >= 2 * payload as u64, "{tcp} and {shared} of {payload}: {}", world.place.log());
    world.place.shared(tcp + shared, 80).unwrap();
}

/// Moves `size` bytes in each direction through the proxy in C.
fn relay(test: &str, mode: &str, size: usize) {
    let Some(world) = World::new(test, &["cc"], Place::new) else { return };
    let proxy = built(&world.place, "splice.c");
    let (python, relayed, size_text) = (interpreter(), script("relayed.py"), size.to_string());
    let served = fs::File::create(world.place.path("served")).unwrap();
    let words = [&python[..], &relayed, "serve", SERVER, "9001", &size_text];
    let mut server = Started::new(world.command(SERVERS, &words).stdout(served));
    world.namespaces.wait_for(9001);
    let words = [proxy.to_str().unwrap(), mode, "9000", SERVER, "9001"];
    let counted = fs::File::create(world.place.path("counted")).unwrap();
    let mut proxy = Started::new(world.command(SERVERS, &words).stdout(counted));
    world.namespaces.wait_for(9000);
    let said = world.ask(&[&python, &relayed, "ask", SERVER, "9000", &size_text]);
    assert_eq!(said, format!("whole: {size} True\n"), "{}", world.place.log());
    assert!(server.finish().success() && proxy.finish().success());
    assert_eq!(fs::read_to_string(world.place.path("served")).unwrap(), said);
    let counted = fs::read_to_string(world.place.path("counted")).unwrap();
    assert_eq!(counted, format!("there: {size}\nback: {size}\n"));
    assert_shared(&world, 2 * size);
    world.place.assert_tidy();
}

#[test]
fn splice_that_waits_between_joined_connections_stays_in_shared_memory() {
    relay("splice_that_waits_between_joined_connections_stays_in_shared_memory", "wait", 64 << 20);
}

#[test]
fn splice_that_does_not_wait_between_joined_connections_stays_in_shared_memory() {
    relay("splice_that_does_not_wait_between_joined_connections_stays_in_shared_memory", "poll", 64 << 20);
}

#[test]
fn haproxy_with_splice_stays_in_shared_memory() {
    let test = "haproxy_with_splice_stays_in_shared_memory";
    let Some(world) = World::new(test, &["haproxy", "nginx", "curl"], Place::new) else { return };
    let www = world.place.path("www");
    fs::create_dir(&www).unwrap();
    let whole = random_file(&www.join("file"), 2 * LONG);
    let nginx = format!(
        "daemon off; user root; worker_processes 1; pid {}; error_log stderr; events {{ worker_connections 1024; }}\n\
         http {{ access_log off; sendfile on; server {{ listen {SERVER}:8081; root {}; }} }}\n",
        world.text("nginx.pid"),
        world.text("www")
    );
    let nginx = world.file("nginx.conf", &nginx);
    let mut server = world.serve(8081, &["nginx", "-c", &nginx, "-p", &world.text("")]);
    for mode in ["http", "tcp"] {
        let haproxy = format!(
            "global\n  maxconn 100\ndefaults\n  mode {mode}\n  option splice-auto\n  option splice-response\n  option splice-request\n  \
             timeout connect 5s\n  timeout client 30s\n  timeout server 30s\n\
             listen one\n  bind {SERVER}:8080\n  server nginx {SERVER}:8081\n"
        );
        let haproxy = world.file("haproxy.conf", &haproxy);
        let before = world.place.received();
        let mut proxy = Started::new(&mut world.command(SERVERS, &["haproxy", "-db", "-f", &haproxy]));
        world.namespaces.wait_for(8080);
        let (to, url) = (world.text("fetched"), format!("http://{SERVER}:8080/file"));
        let words = ["curl", "-sf", &url, &url, &url, "-o", &to, "-o", &to, "-o", &to];
        world.ask(&words);
        assert!(fs::read(&to).unwrap() == whole, "{mode}: the file differs");
        let many: Vec<_> = (0..4).map(|n| world.text(&format!("fetched{n}"))).collect();
        let mut clients: Vec<_> =
            many.iter().map(|to| Started::new(&mut world.command(CLIENTS, &["curl", "-sf", &url, "-o", to]))).collect();
        assert!(clients.iter_mut().all(|client| client.finish().success()), "{mode}");
        for to in &many {
            assert!(fs::read(to).unwrap() == whole, "{mode}: {to} differs");
        }
        proxy.terminate();
        let after = world.place.received();
        let (tcp, shared) = (after.0 - before.0, after.1 - before.1);
        assert!(shared + tcp >= 2 * 7 * whole.len() as u64, "{mode}: {tcp} and {shared}");
        assert!(shared * 100 >= (shared + tcp) * 80, "{mode}: {shared} shared, {tcp} over TCP: {}", world.place.log());
    }
    server.terminate();
}
