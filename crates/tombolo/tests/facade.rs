// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tombolo as a program sees it: an address, two endpoints, bytes and messages.

use std::{
    io::{ErrorKind, Read, Write},
    os::fd::AsFd,
    thread,
    time::Duration,
};

use tombolo::{Deadline, Ending, Error, Liveness, Messages, Options, Stream};

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
    assert!(matches!(&error, Error::UnknownScheme { known, .. } if known == "local, vm, xen"), "{error}");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(matches!(tombolo::listen("nowhere"), Err(Error::Address(_))));
}

#[test]
fn v1_machine_out_of_reach_is_told_with_what_is_missing() {
    let error = tombolo::connect("vm:no-such-machine/web").unwrap_err();
    let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    let told = format!("{error}: {source}");
    // A running broker knows no such machine; elsewhere there is no broker.
    assert!(told.contains("no-such-machine") || told.contains("start tombolod"), "{told}");
    assert!(matches!(tombolo::connect("vm:web"), Err(Error::Domain(_))));
}

#[test]
fn c1_backend_that_this_machine_lacks_says_what_is_missing() {
    if std::path::Path::new("/dev/xen/xenbus").exists() {
        let test = "c1_backend_that_this_machine_lacks_says_what_is_missing";
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs a machine without Xen): this is a domain of Xen's");
        return;
    }
    let error = tombolo::connect("xen:0/service").unwrap_err().to_string();
    assert!(error.contains("/dev/xen/xenbus") && error.contains("modprobe"), "{error}");
    assert!(matches!(tombolo::connect("xen:service"), Err(Error::Domain(_))));
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
        assert_eq!((server.liveness(), server.peer().pid), (Liveness::Running, Some(std::process::id())));
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

/// Returns both endpoints of a channel.
fn pair<C: tombolo::Channel + Send>(address: &str, options: &Options) -> [C; 2] {
    let mut listener = tombolo::listen_with::<C>(address, options).unwrap();
    thread::scope(|scope| {
        let there = scope.spawn(|| tombolo::connect_with(address, &patient()).unwrap());
        [listener.accept_until(Deadline::after(SOON)).unwrap(), there.join().unwrap()]
    })
}

#[test]
fn watch_tells_of_the_peer_while_the_halves_are_in_use() {
    let (_folder, address) = place();
    let [here, there] = pair::<Stream>(&address, &Options::new());
    let watch = here.watch();
    let (mut reader, writer) = here.into_split();
    thread::scope(|scope| {
        scope.spawn(move || reader.read_until(&mut [0; 1], Deadline::after(SOON)).unwrap());
        assert_eq!(watch.peer().pid, Some(std::process::id()));
        assert_eq!(watch.liveness(), Liveness::Running);
        drop(there);
        drop(writer);
    });
    assert!(watch.liveness().is_gone());
}

#[test]
fn vectored_twins_do_not_wait_longer_than_they_may() {
    use std::io::{IoSlice, IoSliceMut};
    let (_folder, address) = place();
    let [here, there] = pair::<Stream>(&address, &Options::new().ring_size(4096));
    let ((_, mut writer), (mut reader, _)) = (here.into_split(), there.into_split());
    let (mut first, mut second) = ([0; 3], [0; 5]);
    let into = &mut [IoSliceMut::new(&mut first), IoSliceMut::new(&mut second)];
    assert_eq!(reader.try_read_vectored(into).unwrap(), None);
    assert!(matches!(reader.read_vectored_until(into, Deadline::NOW), Err(Error::TimedOut)));
    let from = [IoSlice::new(b"one"), IoSlice::new(b" two")];
    assert_eq!(writer.try_write_vectored(&from).unwrap(), Some(7));
    assert_eq!(reader.read_vectored_until(into, Deadline::after(SOON)).unwrap(), 7);
    assert_eq!((&first, &second[..4]), (b"one", &b" two"[..]));
    assert_eq!(reader.statistics().counters.bytes, 7);
    let many = vec![IoSlice::new(&[7; 1000]); 5];
    while writer.try_write_vectored(&many).unwrap().is_some() {}
    assert!(matches!(writer.write_vectored_until(&many, Deadline::NOW), Err(Error::TimedOut)));
}

#[test]
fn reserving_twins_take_room_where_there_is_some() {
    let (_folder, address) = place();
    let [here, there] = pair::<Messages>(&address, &Options::new().ring_size(4096));
    let ((mut sender, _), (_, mut receiver)) = (here.into_split(), there.into_split());
    let (first, second) = sender.try_reserve(3000).unwrap().expect("an empty ring");
    assert_eq!(first.len() + second.len(), 3000);
    sender.commit(3000).unwrap();
    assert!(sender.try_reserve(3000).unwrap().is_none());
    assert_eq!(sender.statistics().counters.messages, 1);
    assert!(matches!(sender.try_reserve(5000), Err(Error::TooLarge { .. })));
    assert!(receiver.peek().unwrap().is_some());
    receiver.consume().unwrap();
    // Bytes that were read are not handed back until the program asks for it.
    receiver.release().unwrap();
    assert!(sender.try_reserve(3000).unwrap().is_some());
    let parts = [std::io::IoSlice::new(b"a"), std::io::IoSlice::new(b"b")];
    assert!(sender.try_send_vectored(&parts).unwrap().is_some());
    assert_eq!(receiver.recv(&mut [0; 8]).unwrap(), Some(2));
}

#[test]
fn errors_have_the_numbers_that_sockets_have() {
    let (_folder, address) = place();
    let number = |error: Error| error.errno();
    assert_eq!(number(tombolo::connect("nowhere").unwrap_err()), 22); // EINVAL
    assert_eq!(number(tombolo::connect("pigeon:post").unwrap_err()), 97); // EAFNOSUPPORT
    assert_eq!(number(tombolo::connect(&address).unwrap_err()), 2); // ENOENT
    let _listener = tombolo::listen(&address).unwrap();
    assert_eq!(number(tombolo::listen(&address).unwrap_err()), 98); // EADDRINUSE
    let [mut here, there] = pair::<Stream>(&format!("{address}2"), &Options::new());
    let (reader, writer) = here.split();
    assert_eq!(number(reader.read_until(&mut [0; 1], Deadline::NOW).unwrap_err()), 110); // ETIMEDOUT
    drop(there);
    let gone = loop {
        if let Err(error) = writer.write_until(&[0; 4096], Deadline::after(SOON)) {
            break error;
        }
    };
    assert_eq!(number(gone), 32); // EPIPE
}
