// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Sockets that a program waits for since before they were connected, or in ways that the library does not see: a wait
//! gives the same result as without the library.

#[macro_use]
mod place;

use std::process::Command;

use place::{
    Place, SERVER, built, has, output,
    world::{World, interpreter, number_after, script},
};

/// Asserts that a case of `registrations.c` prints the same with the library, and that the log shows both endpoints as
/// joined, or not.
fn same(case: &str, joined: bool) {
    if !has(case, &["cc"]) {
        return;
    }
    let place = Place::new();
    let program = built(&place, "registrations.c");
    let plain = output(Command::new(&program).arg(case), &place.path("plain"));
    let mut command = Command::new(&program);
    place.dress(command.arg(case).env("TOMBOLO_SOCKETS_AFTER", "0"));
    assert_eq!(output(&mut command, &place.path("with")), plain, "{case}: {}", place.log());
    assert_eq!(place.log().contains("joined"), joined, "{case}: {}", place.log());
    place.assert_none_reset();
}

#[test]
fn socket_that_is_in_a_set_before_it_is_connected_is_reported() {
    for case in ["level", "edge", "oneshot", "exclusive"] {
        same(case, true);
    }
}

#[test]
fn thread_that_sleeps_in_a_set_since_before_there_was_a_connection_gets_the_programs_events() {
    same("asleep", true);
    same("asleep early", true);
}

#[test]
fn registration_whose_number_is_closed_and_reused_stays_apart_from_the_new_one() {
    same("reused", true);
    same("reused joined", true);
}

#[test]
fn registration_whose_number_is_closed_and_made_anew_for_its_socket_is_there() {
    same("renewed", true);
    same("renewed alone", true);
}

#[test]
fn registration_for_one_event_is_told_to_one_thread_of_a_pool_while_its_connection_is_joined() {
    same("told once", true);
}

#[test]
fn registration_for_one_event_that_was_told_before_the_join_is_not_told_again() {
    same("spent", true);
}

#[test]
fn registration_that_is_changed_while_another_cannot_be_prepared_gives_what_was_asked_last() {
    same("half", true);
    same("half twice", true);
}

#[test]
fn thread_that_polls_while_the_connection_is_joined_is_woken() {
    same("polled", true);
}

#[test]
fn call_that_does_not_wait_and_has_one_place_hears_what_is_behind_the_librarys_own_events() {
    same("crowded", true);
}

#[test]
fn calls_with_few_places_tell_of_everything_that_is_ready_by_turns() {
    same("turns", true);
}

#[test]
fn thread_that_sleeps_in_a_set_is_woken_after_another_took_what_was_to_wake_it() {
    same("taken change", true);
    same("taken edge", true);
}

#[test]
fn socket_that_is_had_by_a_way_that_is_not_watched_stays_on_tcp() {
    for case in ["copied", "inherited", "signalled"] {
        same(case, false);
    }
}

#[test]
fn server_whose_child_closes_the_joined_socket_goes_on_by_its_set() {
    same("child", true);
}

#[test]
fn set_with_a_number_beyond_the_table_gives_its_events() {
    same("far", true);
}

/// nginx in front of two servers, over HTTP and over FastCGI, with kept connections that it adds to its epoll set
/// before they are connected. Everything but the client is in one network namespace.
fn proxy(world: &World) -> u64 {
    const UPSTREAM: &str = "9001";
    const FASTCGI: &str = "9002";
    let mut servers = [UPSTREAM, FASTCGI].map(|port| {
        let number = port.parse().unwrap();
        world.serve(number, &[&interpreter(), &script("upstream.py"), SERVER, UPSTREAM, FASTCGI, port])
    });
    let configuration = format!(
        "daemon off; user root; worker_processes 2; pid {}; error_log stderr; events {{ worker_connections 1024; }}\n\
         http {{ access_log off; keepalive_requests 100000000;\n\
         upstream web {{ server {SERVER}:{UPSTREAM}; keepalive 8; }} upstream cgi {{ server {SERVER}:{FASTCGI}; keepalive 8; }}\n\
         client_body_temp_path {}; proxy_temp_path {}; fastcgi_temp_path {};\n\
         server {{ listen {SERVER}:8080; proxy_http_version 1.1; proxy_set_header Connection \"\"; proxy_read_timeout 5s;\n\
         fastcgi_read_timeout 5s; proxy_next_upstream off; fastcgi_next_upstream off;\n\
         location /web {{ proxy_pass http://web; }}\n\
         location /cgi {{ fastcgi_pass cgi; fastcgi_keep_conn on; fastcgi_param REQUEST_URI $request_uri; }} }} }}\n",
        world.text("nginx.pid"),
        world.text("body"),
        world.text("proxied"),
        world.text("answers"),
    );
    let configuration = world.file("nginx.conf", &configuration);
    let mut server = world.serve(8080, &["nginx", "-c", &configuration, "-p", &world.text("")]);
    let said = world.ask(&[&interpreter(), &script("upstream.py"), SERVER, "8080", "ask", "8", "400"]);
    assert_eq!(number_after(&said, "right:"), 2 * 8 * 400, "{said}\n{}", world.place.log());
    server.terminate();
    servers.iter_mut().for_each(place::Started::terminate);
    number_after(&said, "bytes:")
}

accelerated! {
    nginx_that_asks_other_servers_over_kept_connections_goes_through_shared_memory, ["nginx"], proxy;
}
