// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What a program sees of Tombolo: an address, two ends, bytes and messages.

use std::{
    io::{ErrorKind, Read, Write},
    os::fd::AsFd,
    thread,
    time::Duration,
};

use tombolo::{Deadline, Ending, Error, Life, Messages, Options, Stream};

const SOON: Duration = Duration::from_secs(10);

/// A folder and an address in it.
fn place() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let address = format!("local:{}/service", folder.path().display());
    (folder, address)
}

fn patient() -> Options {
    Options::new().wait_for_listener(SOON)
}

#[test]
fn c1_unknown_scheme_is_refused_and_the_known_ones_are_named() {
    let error = tombolo::connect("pigeon:post").unwrap_err();
    assert!(matches!(&error, Error::UnknownScheme { known, .. } if known == "local"), "{error}");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(matches!(tombolo::listen("nowhere"), Err(Error::Address(_))));
}

#[test]
fn c1_errors_become_io_errors_of_the_kind_that_sockets_have() {
    let (_folder, address) = place();
    assert_eq!(std::io::Error::from(tombolo::connect(&address).unwrap_err()).kind(), ErrorKind::NotFound);
    let _listener = tombolo::listen(&address).unwrap();
    assert_eq!(tombolo::listen(&address).unwrap_err().kind(), ErrorKind::AddrInUse);
}

#[test]
fn c9_request_and_answer_with_half_close() {
    let (_folder, address) = place();
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut client: Stream = tombolo::connect_with(&address, &patient()).unwrap();
            client.write_all(b"request").unwrap();
            client.split().1.close();
            let mut answer = String::new();
            client.read_to_string(&mut answer).unwrap();
            assert_eq!(answer, "tseuqer");
        });
        let mut server = tombolo::listen(&address).unwrap().accept_until(Deadline::after(SOON)).unwrap();
        let mut request = Vec::new();
        server.read_to_end(&mut request).unwrap();
        assert_eq!(server.split().0.ending(), Some(Ending::Closed));
        request.reverse();
        server.write_all(&request).unwrap();
        server.split().1.drained_until(Deadline::after(SOON)).unwrap();
    });
}

#[test]
fn c8_peer_is_known_alive_and_counted() {
    let (_folder, address) = place();
    thread::scope(|scope| {
        let client = scope.spawn(|| tombolo::connect_with::<Messages>(&address, &patient()).unwrap());
        let mut listener = tombolo::listen_with::<Messages>(&address, &Options::new()).unwrap();
        let mut server = listener.accept_until(Deadline::after(SOON)).unwrap();
        let mut client = client.join().unwrap();
        assert_eq!((server.life(), server.peer().pid), (Life::Running, Some(std::process::id())));
        assert!(server.as_fd().try_clone_to_owned().is_ok());
        client.send(b"one").unwrap();
        client.send(b"").unwrap();
        let mut buffer = [0; 8];
        assert_eq!(server.recv(&mut buffer).unwrap(), Some(3));
        assert_eq!(server.recv(&mut buffer).unwrap(), Some(0));
        assert_eq!(client.statistics().sent.counters.messages, 2);
        assert_eq!(server.statistics().received.counters.messages, 2);
        drop(client);
        assert_eq!(server.recv(&mut buffer).unwrap(), None);
    });
}

#[cfg(feature = "tokio")]
#[test]
fn r12_stream_works_on_a_runtime() {
    use ::tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tombolo::tokio::{AsyncListener, AsyncStream};

    let (_folder, address) = place();
    let runtime = ::tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let mut listener = AsyncListener::new(tombolo::listen(&address).unwrap()).unwrap();
        let client = thread::spawn(move || tombolo::connect(&address).unwrap());
        let mut server = AsyncStream::new(listener.accept().await.unwrap()).unwrap();
        let mut client = AsyncStream::new(client.join().unwrap()).unwrap();
        let mut echo = [0; 5];
        client.write_all(b"hello").await.unwrap();
        server.read_exact(&mut echo).await.unwrap();
        server.write_all(&echo).await.unwrap();
        client.read_exact(&mut echo).await.unwrap();
        assert_eq!(&echo, b"hello");
    });
}
