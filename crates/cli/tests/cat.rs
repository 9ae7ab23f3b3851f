// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo cat`, as it is used: two processes, files and pipes.

mod common;

use std::{
    fs,
    io::{Read, Write},
    os::unix::process::ExitStatusExt,
    process::Stdio,
    time::Duration,
};

use common::{Place, Running, noise, wait_until};
use rustix::process::Signal;
use serde_json::Value;
use tombolo::{Deadline, Options, Stream};

const MIB: usize = 1 << 20;

/// Returns a channel with the `tombolo cat` that listens at `place`.
fn connect(place: &Place) -> Stream {
    let options = Options::new().wait_for_listener(Duration::from_secs(10));
    tombolo::connect_with(&place.address(), &options).unwrap()
}

/// Returns the report of a direction, among those printed as JSON.
fn report(said: &str, direction: &str) -> Value {
    let lines = said.lines().map(|line| serde_json::from_str::<Value>(line).expect(line));
    lines.into_iter().find(|line| line["direction"] == direction).unwrap_or_else(|| panic!("no {direction}: {said}"))
}

#[test]
fn files_both_ways_at_once_arrive_whole_and_digests_agree() {
    let place = Place::new();
    let (left, left_bytes) = place.file("left", 9 * MIB + 1);
    let (right, right_bytes) = place.file("right", 5 * MIB + 4095);
    let (at_left, at_right) = (place.path("at left").display().to_string(), place.path("at-right"));
    let listener = place.listen(&format!("{} --checksum --json -o {}", right.display(), at_right.display()));
    let words = ["cat", "-c", "--json", "--connect", &place.address(), "--output", &at_left, left.to_str().unwrap()];
    let connector = Running::start(&words, |_| {}).end().expect(0);
    let listener = listener.end().expect(0);
    assert!(fs::read(at_left).unwrap() == right_bytes && fs::read(at_right).unwrap() == left_bytes);
    assert!(connector.out.is_empty() && listener.out.is_empty());
    for (from, to, len) in [(&connector, &listener, left_bytes.len()), (&listener, &connector, right_bytes.len())] {
        let (sent, received) = (report(&from.said, "sent"), report(&to.said, "received"));
        assert_eq!((&sent["bytes"], &received["bytes"]), (&len.into(), &len.into()));
        assert_eq!(sent["sha256"], received["sha256"]);
        assert_eq!(sent["sha256"].as_str().unwrap().len(), 64);
    }
}

#[test]
fn pipes_both_ways_through_the_smallest_ring_arrive_whole() {
    let place = Place::new();
    let (left, right) = (noise(MIB + 7), noise(MIB - 9));
    let listener = place.listen("--ring 4KiB").feed(right.clone()).heard();
    let connector = place.connect("--ring 4KiB --spin 0").feed(left.clone()).end_with_open_input().expect(0);
    let listener = listener.end_with_open_input().expect(0);
    assert!(connector.out == right && listener.out == left);
    assert_eq!((connector.said.as_str(), listener.said.as_str()), ("", ""), "nothing is said unasked");
}

#[test]
fn bytes_through_rings_that_follow_their_load_arrive_whole() {
    let place = Place::new();
    let (left, right) = (noise(24 * MIB + 7), noise(9 * MIB - 9));
    for checksum in ["", "--checksum "] {
        let listener = place.listen(&format!("{checksum}--ring auto")).feed(right.clone()).heard();
        let connector = place.connect(&format!("{checksum}--ring auto")).feed(left.clone());
        let connector = connector.end_with_open_input().expect(0);
        let listener = listener.end_with_open_input().expect(0);
        assert!(connector.out == right && listener.out == left);
    }
}

#[test]
fn empty_input_is_a_complete_transfer() {
    let place = Place::new();
    let listener = place.listen("--checksum").hush();
    let connector = place.connect("").end().expect(0);
    let listener = listener.end().expect(0);
    assert!(connector.out.is_empty() && listener.out.is_empty());
    let nothing = "SHA-256 e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    assert!(listener.said.contains("received 0 bytes") && listener.said.contains(nothing), "{}", listener.said);
}

#[test]
fn end_of_input_ends_one_direction_only() {
    let place = Place::new();
    let mut listener = place.listen("");
    let connector = place.connect("").feed(b"question".to_vec());
    let mut question = [0; 8];
    listener.child.stdout.as_mut().unwrap().read_exact(&mut question).unwrap();
    assert_eq!(&question, b"question");
    // The question has ended; the answer comes all the same.
    let listener = listener.feed(b"answer".to_vec());
    assert_eq!(connector.end_with_open_input().expect(0).out, b"answer");
    listener.end_with_open_input().expect(0);
}

#[test]
fn input_that_never_ends_is_left_when_the_peer_is_done() {
    let place = Place::new();
    let listener = place.listen("");
    place.connect("--send-only").feed(b"all".to_vec()).end_with_open_input().expect(0);
    assert_eq!(listener.end_with_open_input().expect(0).out, b"all");
}

#[test]
fn words_arrive_as_they_are_said() {
    let place = Place::new();
    let mut listener = place.listen("");
    let mut connector = place.connect("");
    for word in ["one", "two", "six"] {
        connector.child.stdin.as_mut().unwrap().write_all(word.as_bytes()).unwrap();
        let mut heard = [0; 3];
        listener.child.stdout.as_mut().unwrap().read_exact(&mut heard).unwrap();
        assert_eq!(heard, word.as_bytes());
    }
    drop(connector.child.stdin.take());
    drop(listener.child.stdin.take());
    connector.end().expect(0);
    listener.end().expect(0);
}

#[test]
fn connecting_first_waits_for_the_listener() {
    let place = Place::new();
    let connector = place.connect("--wait 60").feed(b"early".to_vec());
    wait_until("it tries", || {
        let stat = fs::read_to_string(format!("/proc/{}/wchan", connector.child.id())).unwrap_or_default();
        !stat.is_empty() && !place.socket_is_there()
    });
    let listener = place.listen("").end().expect(0);
    assert_eq!(listener.out, b"early");
    connector.end_with_open_input().expect(0);
}

#[test]
fn nobody_there_is_said_with_a_hint() {
    let place = Place::new();
    place.connect("--wait 0.05").end().expect_failure(1, &["nobody listens", "start the listening side first"]);
    place.cat("--listen", "--wait 0.05").end().expect_failure(1, &["nobody connected", "within 0.05 s"]);
    assert!(!place.socket_is_there());
}

#[test]
fn command_lines_without_sense_are_refused_with_2() {
    let place = Place::new();
    let here = &place.address()[..];
    for words in [
        &["cat"][..],
        &["cat", "--connect", here, "--listen", here],
        &["cat", "--connect", here, "--no-such-flag"],
        &["cat", "--connect", "nonsense"],
        &["cat", "--connect", "pigeon:x"],
        &["cat", "--listen", "local:a/b"],
        &["cat", "--connect", here, "--ring", "1"],
        &["cat", "--connect", here, "--ring", "4KB"],
        &["cat", "--connect", here, "--timeout", "-1"],
        &["cat", "--connect", here, "--keep"],
        &["cat", "--connect", here, "--send-only", "--receive-only"],
        &["cat", "--connect", here, "/no/such/file"],
        &["cat", "--connect", here, "/"],
        &["cat", "--connect", here, "--output", "/no/such/folder/file"],
        &["cat", "--listen", "local:/no/such/folder/socket"],
        &["dog"],
        &[],
    ] {
        let ended = Running::start(words, |_| {}).end().expect(2);
        assert!(ended.out.is_empty() && !ended.said.is_empty(), "{words:?}: {ended:?}");
    }
}

#[test]
fn help_and_version_go_to_standard_output() {
    for words in [&["--help"][..], &["--version"], &["cat", "--help"], &["bench", "--help"], &["demo", "--help"]] {
        let ended = Running::start(words, |_| {}).end().expect(0);
        assert!(!ended.out.is_empty() && ended.said.is_empty(), "{words:?}: {ended:?}");
    }
}

#[test]
fn sender_killed_in_the_middle_leaves_what_it_sent_and_exit_code_1() {
    let place = Place::new();
    let output = place.path("out");
    let listener = place.listen(&format!("--receive-only -o {}", output.display()));
    let mut sender = place.connect("--send-only");
    let bytes = noise(3 * MIB);
    sender.child.stdin.as_mut().unwrap().write_all(&bytes).unwrap();
    wait_until("all of it arrives", || fs::metadata(&output).unwrap().len() == bytes.len() as u64);
    sender.signal(Signal::KILL);
    listener.end().expect_failure(1, &["incomplete", "died", &bytes.len().to_string()]);
    assert!(fs::read(output).unwrap() == bytes);
}

#[test]
fn sender_killed_with_a_full_ring_leaves_a_beginning_of_what_it_sent() {
    let place = Place::new();
    let mut listener = place.listen("--receive-only");
    let bytes = noise(8 * MIB);
    let sender = place.connect("--send-only").feed(bytes.clone());
    let mut first = [0; 1000];
    listener.child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    sender.signal(Signal::KILL);
    let ended = listener.end().expect_failure(1, &["incomplete", "died"]);
    let arrived = [&first[..], &ended.out].concat();
    assert!(arrived.len() < bytes.len() && bytes.starts_with(&arrived), "{} bytes", arrived.len());
}

#[test]
fn receiver_killed_in_the_middle_fails_the_sender() {
    let place = Place::new();
    let listener = place.listen("--receive-only");
    let sender = place.connect("--send-only").feed(noise(8 * MIB));
    wait_until("they met", || !place.socket_is_there());
    listener.signal(Signal::KILL);
    sender.end_with_open_input().expect_failure(1, &[" after "]);
}

#[test]
fn input_that_cannot_be_read_is_not_taken_for_its_end() {
    let place = Place::new();
    let listener = place.listen("--receive-only");
    // A read of one's own memory at address 0 is an error.
    let sender = place.connect("--send-only /proc/self/mem").end().expect_failure(1, &["cannot read /proc/self/mem"]);
    assert!(sender.out.is_empty());
    listener.end().expect_failure(1, &["incomplete", "gave up"]);
}

#[test]
fn output_that_cannot_be_written_fails() {
    let place = Place::new();
    let listener = place.listen("--receive-only --output /dev/full");
    let sender = place.connect("--send-only").feed(noise(MIB * 4));
    listener.end().expect_failure(1, &["cannot write /dev/full", "No space left"]);
    sender.end_with_open_input().expect_failure(1, &["sending stopped"]);
}

#[test]
fn output_that_nobody_reads_any_more_is_success() {
    let place = Place::new();
    let mut listener = place.listen("--receive-only");
    let sender = place.connect("--send-only").feed(noise(MIB * 8));
    let mut first = [0; 10];
    listener.child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let ended = listener.end().expect(0);
    assert_eq!(ended.said, "");
    sender.end_with_open_input().expect_failure(1, &["sending stopped"]);
}

#[test]
fn listener_that_is_terminated_leaves_no_socket() {
    let place = Place::new();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let listener = place.listen("");
        listener.signal(signal);
        let ended = listener.end_with_open_input();
        assert_eq!(ended.status.signal(), Some(signal.as_raw()), "{}", ended.said);
        assert_eq!(ended.said, "tombolo: interrupted\n");
        assert!(!place.socket_is_there());
    }
}

#[test]
fn sender_that_is_terminated_gives_up_instead_of_dying() {
    let place = Place::new();
    let mut listener = place.listen("");
    let mut sender = place.connect("");
    sender.child.stdin.as_mut().unwrap().write_all(b"some").unwrap();
    listener.child.stdout.as_mut().unwrap().read_exact(&mut [0; 4]).unwrap();
    sender.signal(Signal::TERM);
    let ended = sender.end_with_open_input();
    assert_eq!(ended.status.signal(), Some(Signal::TERM.as_raw()));
    assert!(ended.said.contains("interrupted after 4 bytes sent"), "{}", ended.said);
    listener.end_with_open_input().expect_failure(1, &["incomplete: the peer gave up after 4 bytes"]);
}

#[test]
fn silence_ends_at_the_timeout_in_both_directions() {
    let place = Place::new();
    let listener = place.listen("");
    let idle = place.connect("--timeout 0.1").end_with_open_input();
    idle.expect_failure(1, &["nothing moved for 0.1 s", "0 bytes sent and 0 received"]);
    listener.end_with_open_input().expect(1);

    let listener = place.listen("");
    let sender = place.connect("--timeout 0.1").feed(noise(4 * MIB));
    wait_until("they met", || !place.socket_is_there());
    listener.signal(Signal::STOP);
    sender.end_with_open_input().expect_failure(1, &["nothing moved for 0.1 s"]);
    listener.signal(Signal::CONT);
}

#[test]
fn peer_that_reads_slowly_and_steadily_is_not_silent() {
    let place = Place::new();
    // As many bytes again wait in the ring as fit into it, once all of them are written.
    let sender = place.listen("--send-only --ring 4KiB --timeout 1").feed(noise(8 << 10));
    let (mut read, write) = connect(&place).into_split();
    let mut bytes = 0;
    loop {
        match read.read(&mut [0; 512]).unwrap() {
            0 => break,
            len => bytes += len,
        }
        std::thread::park_timeout(Duration::from_millis(200));
    }
    assert_eq!(bytes, 8 << 10);
    drop((read, write));
    assert_eq!(sender.end_with_open_input().expect(0).said, "");
}

#[test]
fn peer_that_ends_its_direction_and_then_is_silent_or_dies_is_noticed_beside_an_idle_input() {
    for killed in [false, true] {
        let place = Place::new();
        let mut idle = place.listen(if killed { "" } else { "--timeout 0.3" });
        let peer = place.connect("").feed(b"all".to_vec());
        idle.child.stdout.as_mut().unwrap().read_exact(&mut [0; 3]).unwrap();
        if killed {
            // The thread that receives ends with the direction.
            let tasks = format!("/proc/{}/task", idle.child.id());
            wait_until("the end has come", || fs::read_dir(&tasks).unwrap().count() == 2);
            peer.signal(Signal::KILL);
        }
        let said = if killed { "sending stopped after 0 bytes" } else { "nothing moved for 0.3 s" };
        idle.end_with_open_input().expect_failure(1, &[said]);
    }
}

#[test]
fn bytes_that_a_closing_peer_did_not_read_are_no_success_beside_an_idle_input() {
    let place = Place::new();
    let mut idle = place.listen("");
    idle.child.stdin.as_mut().unwrap().write_all(b"lost").unwrap();
    let mut peer = connect(&place);
    assert_eq!(peer.split().0.wait_for(4, Deadline::after(Duration::from_secs(10))).unwrap(), 4);
    drop(peer);
    idle.end_with_open_input().expect_failure(1, &["sending stopped after 4 bytes", "does not read any more"]);
}

#[test]
fn one_way_flags_move_one_way() {
    let place = Place::new();
    let listener = place.listen("--receive-only").feed(b"not this".to_vec()).heard();
    let sender = place.connect("--send-only").feed(b"this".to_vec()).end_with_open_input().expect(0);
    assert_eq!(listener.end_with_open_input().expect(0).out, b"this");
    assert!(sender.out.is_empty());

    // A sender whose peer does not receive gets an error. It has something to send from the start: one that has nothing
    // until its peer has left has lost nothing.
    let (input, _) = place.file("input", 4 * MIB);
    let listener = place.listen("--send-only").hush().heard();
    place.connect(input.to_str().unwrap()).end().expect_failure(1, &["sending stopped"]);
    listener.end().expect(0);
}

#[test]
fn kept_listener_serves_one_after_another_and_outlives_a_bad_one() {
    let place = Place::new();
    let (file, bytes) = place.file("served", 100_000);
    let listener = place.listen(&format!("--keep --send-only {}", file.display()));
    assert!(place.connect("--receive-only").end().expect(0).out == bytes);
    let killed = place.connect("--receive-only");
    killed.signal(Signal::KILL);
    killed.end();
    assert!(place.connect("--receive-only").end().expect(0).out == bytes);
    assert!(place.socket_is_there());
    listener.signal(Signal::TERM);
    assert_eq!(listener.end_with_open_input().status.signal(), Some(Signal::TERM.as_raw()));
    assert!(!place.socket_is_there());
}

#[test]
fn output_file_is_emptied_only_when_somebody_is_there() {
    let place = Place::new();
    let (file, bytes) = place.file("precious", 100);
    let output = format!("--wait 0.05 --output {}", file.display());
    place.connect(&output).end().expect(1);
    assert!(fs::read(&file).unwrap() == bytes);
    let listener = place.listen(&output.replace("0.05", "60")).hush();
    place.connect("").feed(b"new".to_vec()).end_with_open_input().expect(0);
    listener.end().expect(0);
    assert_eq!(fs::read(&file).unwrap(), b"new");
}

#[test]
fn progress_without_a_terminal_is_lines_and_only_if_asked_for() {
    let place = Place::new();
    let listener = place.listen("--progress").feed(Vec::new());
    let mut sender = place.connect("");
    sender.child.stdin.as_mut().unwrap().write_all(b"a bit").unwrap();
    let mut said = String::new();
    let mut listener = listener;
    let error = listener.child.stderr.as_mut().unwrap();
    wait_until("a line of progress", || {
        let mut byte = [0];
        error.read_exact(&mut byte).unwrap();
        said.push(char::from(byte[0]));
        said.ends_with('\n')
    });
    assert!(said.starts_with("received 5 B") && !said.contains('\r'), "{said:?}");
    assert_eq!(sender.end().expect(0).said, "");
    listener.end_with_open_input().expect(0);
}

#[test]
fn file_on_standard_input_is_sent_from_where_it_stands() {
    let place = Place::new();
    let (path, bytes) = place.file("in", 3000);
    let mut file = fs::File::open(path).unwrap();
    file.read_exact(&mut [0; 1000]).unwrap();
    let listener = place.listen("").hush();
    let words = ["cat", "--connect", &place.address(), "-"];
    Running::start(&words, |command| _ = command.stdin(Stdio::from(file))).end().expect(0);
    assert!(listener.end().expect(0).out == bytes[1000..]);
}

/// A caller with a valid greeting that then stores an impossible head as a reader. The returned value keeps it in
/// place.
fn lying_caller(address: &str) -> impl Sized {
    use std::{io::IoSlice, mem::MaybeUninit, os::fd::AsFd};

    use rustix::{
        event::{EventfdFlags, eventfd},
        net::{AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType},
    };
    use tombolo_layout::{
        Features, SegmentHeader, VERSION,
        handshake::{Greeting, Message},
        local::Head,
        state::State,
        words,
    };
    use tombolo_mem::OwnWord;

    let epoch = 0x5eed;
    let (segment, memory) = tombolo_mem::create_sealed("tombolo", 8192).unwrap();
    let (control, _data) = segment.split(4096);
    control.write_header(&SegmentHeader::new(4096, 0, 0, Features::NONE, epoch).encode());
    control.word(words::HEAD).store_release(1 << 40);
    for state in [words::WRITER_STATE, words::READER_STATE] {
        control.word(state).store_release(State::OPEN.encode());
    }
    let (offered, required) = (Features::NONE, Features::NONE);
    let (version_min, version_max) = (VERSION, VERSION);
    let hello =
        Message::Hello(Greeting { version_min, version_max, offered, required, epoch, map_limit: 1 << 31 }).encode();
    let head = Head { doorbells: true, single: false, segment: true, len: hello.len() as u16 }.encode();
    let flags = EventfdFlags::SEMAPHORE | EventfdFlags::NONBLOCK;
    let doorbells = [eventfd(1 << 20, flags).unwrap(), eventfd(1 << 20, flags).unwrap()];
    let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let path = address.strip_prefix("local:").unwrap();
    wait_until("the listener is there", || rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).is_ok());
    let files = [doorbells[0].as_fd(), doorbells[1].as_fd(), memory.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    assert!(rights.push(SendAncillaryMessage::ScmRights(&files)));
    let parts = [IoSlice::new(&head), IoSlice::new(&hello)];
    rustix::net::sendmsg(&socket, &parts, &mut rights, SendFlags::NOSIGNAL).unwrap();
    (socket, control, doorbells)
}

#[test]
fn r8_r19_peer_that_lies_about_its_head_ends_both_directions_and_the_clause_is_named() {
    let place = Place::new();
    let listener = place.listen("").feed(noise(4 * MIB)).hush();
    let address = place.address();
    let _liar = lying_caller(&address);
    let ended = listener.end_with_open_input().expect(1);
    assert!(ended.said.contains("R-8"), "{}", ended.said);
}
