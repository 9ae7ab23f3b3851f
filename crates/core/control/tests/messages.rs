// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The golden vectors of `spec/vectors/broker-message.json`, and random bytes.

use proptest::prelude::*;
use serde_json::Value;
use tombolo_control::{
    ADDRESSES_MAX, ConnectionEnd, Envelope, Form, HEAD_LEN, Head, Life, LinkState, MAGIC, MESSAGE_MAX, Message,
    NetRole, Path, Progress, ROW_WORDS, Seen, Side, Stage, Way, What,
};

fn vectors() -> Vec<Value> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../spec/vectors/broker-message.json");
    let text = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    serde_json::from_str::<Vec<Value>>(&text).unwrap()
}

fn bytes(vector: &Value) -> Vec<u8> {
    let hex = vector["hex"].as_str().expect("hex");
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn path(vector: &Value) -> Path {
    match vector["path"].as_str() {
        Some("host") => Path::Host,
        Some("link") => Path::Link,
        Some("socket") => Path::Socket,
        other => panic!("path {other:?}"),
    }
}

/// Returns the message in the vector of this kind, field by field.
fn expected(kind: u16) -> (u32, Message) {
    let name = |text: &str| text.parse().unwrap();
    let boot = std::array::from_fn(|at| at as u8);
    let (offset, len, channel) = (0x10000, 0x2000, 256);
    match kind {
        1 => (
            0,
            Message::Hello { version_min: 1, version_max: 1, epoch: 0x1122_3344_5566_7788, boot, name: name("web-1") },
        ),
        2 => {
            let (own, theirs) = ("04.0".parse().unwrap(), "1c.3/00.0".parse().unwrap());
            let (link, generation, size, doorbell, vectors, side, allows) = (7, 3, 1 << 20, 5, 2, 1, 1);
            (
                0,
                Message::Link {
                    link,
                    generation,
                    peer: name("db"),
                    own,
                    theirs,
                    size,
                    doorbell,
                    vectors,
                    side,
                    allows,
                },
            )
        }
        3 => (0, Message::Allow { link: 7, way: Way::Out, service: "sql-*".parse().unwrap() }),
        4 => (0, Message::Unlink { link: 7, generation: 3 }),
        5 => (0, Message::Released { link: 7, generation: 3 }),
        6 => (0, Message::Life { link: 7, generation: 3, life: Life::Paused }),
        7 => (0, Message::Bell { link: 7, doorbell: 0xffff }),
        8 => (0, Message::Storm { link: 7 }),
        9 => (0, Message::You { name: name("web-1") }),
        10 => (0, Message::Number { name: name("web-1"), number: 7 }),
        11 => (0, Message::Usage { link: 7, generation: 3, connections: 2, used: 1 << 21 }),
        12 => (0, Message::Leave { link: 7, generation: 3, wait: 1000 }),
        13 => (0, Message::Left { link: 7, generation: 3 }),
        16 => (9, Message::Connect { peer: name("web-1"), service: name("sql-main"), offset, len, channel }),
        17 => (9, Message::Accept { offset, len }),
        18 => (9, Message::Refuse { code: 6, reason: "nein, tut uns leid: ä".into() }),
        19 => (9, Message::Close {}),
        20 => (0, Message::Calls { connections: 2 }),
        21 => {
            let (peer_offset, peer_len, side) = (0x4000, 0x3000, Side::Over);
            (9, Message::Call { offset, len, peer_offset, peer_len, channel, side })
        }
        32 => (1, Message::Listen { service: name("sql-main") }),
        33 => (2, Message::AddLink { a: name("a"), b: name("b"), size: 0 }),
        34 => (3, Message::RemoveLink { a: name("a"), b: name("b") }),
        35 => (4, Message::List { what: What::Domains }),
        36 => (5, Message::Snippet { form: Form::Libvirt, domain: name("a") }),
        37 => {
            let (state, quarantined, note) = (LinkState::Up, 1 << 21, "".into());
            let (link, generation, size) = (7, 3, 1 << 20);
            (4, Message::LinkRow { link, generation, a: name("a"), b: name("b"), size, state, quarantined, note })
        }
        38 => {
            let (slots_used, slots, memory_used, memory) = (2, 28, 1 << 21, 1 << 28);
            let (life, note) = (Life::Running, "note".into());
            (4, Message::DomainRow { name: name("a"), life, slots_used, slots, memory_used, memory, note })
        }
        39 => (5, Message::Line { line: "-device x".into() }),
        40 => (5, Message::Done {}),
        41 => (6, Message::Who { number: 7 }),
        42 => {
            let (stage, life, doorbell, vector) = (Stage::Closed, Life::Paused, 5, 3);
            let (link, connections, used, storms) = (7, 2, 1 << 21, 9);
            (4, Message::EndRow { link, name: name("a"), stage, life, doorbell, vector, connections, used, storms })
        }
        43 => (7, Message::Look { at: Seen::Listeners, after: 5 }),
        44 => {
            let (life, end, progress) = (Life::Paused, ConnectionEnd::Listened, Progress::Closed);
            let (own_words, their_words) = (Box::new(std::array::from_fn(|at| at as u64)), Box::new([0; ROW_WORDS]));
            let row = Message::CallRow {
                at: 7 << 32 | 3,
                link: 7,
                generation: 2,
                peer: name("db"),
                life,
                service: "sql".into(),
                end,
                progress,
                process: 99,
                user: 1000,
                age: 1500,
                own: 1 << 21,
                theirs: 1 << 20,
                storms: u32::MAX,
                own_words,
                their_words,
            };
            (7, row)
        }
        45 => (7, Message::ListenerRow { at: 6, service: name("sql"), process: 99, user: 1000 }),
        46 => (8, Message::Enter { account: name("alice") }),
        15 => {
            let mapped = std::net::Ipv4Addr::new(10, 0, 0, 2).to_ipv6_mapped().octets();
            (0, Message::Addresses { link: 7, addresses: vec![mapped, boot] })
        }
        24 => (9, Message::Seek { key: 0xdeca_fbad }),
        26 => (9, Message::Nobody {}),
        25 => (9, Message::Found { peer: name("db"), service: name("sockets-0123456789abcdef") }),
        27 => (0, Message::Nets { count: 2 }),
        28 => {
            let mapped = |last| std::net::Ipv4Addr::new(10, 9, 0, last).to_ipv6_mapped().octets();
            let (interface, peer, service, role) = (name("lan-db"), name("db"), name("net.lan-web"), NetRole::Connect);
            let (at, mtu, own, prefix, theirs) = (1, 9000, mapped(1), 120, mapped(2));
            let (network, own_mac, their_mac) = ("lan".into(), [2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
            (
                7,
                Message::Net {
                    at,
                    interface,
                    peer,
                    service,
                    role,
                    mtu,
                    own,
                    prefix,
                    theirs,
                    network,
                    own_mac,
                    their_mac,
                },
            )
        }
        50 => (2, Message::Locate { address: boot }),
        51 => (2, Message::Near { domains: 2 }),
        52 => (0, Message::Claim { key: 0xdeca_fbad }),
        53 => (0, Message::Unclaim { key: 0xdeca_fbad }),
        54 => (3, Message::Find { key: 0xdeca_fbad, address: boot }),
        60 => (9, Message::Prepare { domain: name("a") }),
        61 => (9, Message::CancelPrepare { domain: name("a") }),
        62 => (9, Message::PreparedRow { domain: name("a"), links: 2, cut: 1, took: 681, note: "note".into() }),
        other => panic!("no message of kind {other}"),
    }
}

#[test]
fn b1_b2_messages_are_as_the_vectors_say() {
    let mut kinds = std::collections::BTreeSet::new();
    for vector in vectors() {
        let raw = bytes(&vector);
        let decoded = Envelope::decode(path(&vector), &raw);
        if let Some(clause) = vector["refused"].as_str() {
            assert_eq!(decoded.map_err(|fault| fault.clause), Err(clause), "{vector}");
            continue;
        }
        let kind = u16::from_le_bytes([raw[4], raw[5]]);
        let (serial, message) = expected(kind);
        let said = Envelope { serial, message };
        assert_eq!(said.encode(), raw, "{vector}");
        assert_eq!(decoded.as_ref(), Ok(&said), "{vector}");
        assert!(format!("{:?}", said.message).starts_with(vector["shown"].as_str().unwrap()), "{vector}");
        kinds.insert(kind);
    }
    assert_eq!(kinds.len(), 48, "a vector for each kind");
}

#[test]
fn b1_message_of_every_shorter_length_is_refused() {
    for vector in vectors().iter().filter(|vector| vector["refused"].is_null()) {
        let raw = bytes(vector);
        for len in 0..raw.len() {
            assert!(Envelope::decode(path(vector), &raw[..len]).is_err(), "{len} bytes of {vector}");
        }
    }
}

#[test]
fn b1_longest_message_has_a_head_and_one_byte_more_is_refused() {
    let message = |len: usize| {
        let body = (len - HEAD_LEN) as u16;
        let head = [&MAGIC[..], &1u16.to_le_bytes(), &body.to_le_bytes(), &[0; 8]].concat();
        [head, vec![0; len - HEAD_LEN]].concat()
    };
    let longest = message(MESSAGE_MAX);
    let (head, body) = Head::decode(&longest).unwrap();
    assert_eq!((usize::from(head.len), body.len()), (MESSAGE_MAX - HEAD_LEN, MESSAGE_MAX - HEAD_LEN));
    assert_eq!(Head::decode(&message(MESSAGE_MAX + 1)).unwrap_err().clause, "B-1");
}

#[test]
fn b2_as_many_addresses_as_there_may_be_are_taken_and_one_more_is_refused() {
    let all = Message::Addresses { link: 7, addresses: vec![[6; 16]; ADDRESSES_MAX] };
    let raw = Envelope::statement(all.clone()).encode();
    assert_eq!(Envelope::decode(Path::Host, &raw).unwrap().message, all);
    let mut more = raw;
    let count = HEAD_LEN + 4;
    more[count..count + 2].copy_from_slice(&(ADDRESSES_MAX as u16 + 1).to_le_bytes());
    more.extend([6; 16]);
    let len = (more.len() - HEAD_LEN) as u16;
    more[6..8].copy_from_slice(&len.to_le_bytes());
    let refused = Envelope::decode(Path::Host, &more).unwrap_err();
    assert_eq!((refused.clause, refused.what), ("B-2", "too many addresses"));
}

#[test]
#[should_panic(expected = "left == right")]
fn b1_canary_vector_with_one_bit_changed_is_noticed() {
    let vector = &vectors()[3];
    let mut raw = bytes(vector);
    raw[HEAD_LEN] ^= 1;
    let (serial, message) = expected(2);
    assert_eq!(Envelope::decode(path(vector), &raw), Ok(Envelope { serial, message }));
}

/// The fuzzer begins with known cases: `TOMBOLO_SEEDS=fuzz/corpus cargo test … seeds` writes them there.
#[test]
fn seeds_of_the_fuzzer_are_the_vectors() {
    let folder = std::env::var("TOMBOLO_SEEDS").unwrap_or_else(|_| env!("CARGO_TARGET_TMPDIR").into());
    let folder = format!("{folder}/broker_message");
    std::fs::create_dir_all(&folder).unwrap();
    for (index, vector) in vectors().iter().enumerate() {
        let seed = [vec![path(vector) as u8], bytes(vector)].concat();
        std::fs::write(format!("{folder}/vector-{index}"), seed).unwrap();
    }
}

proptest! {
    #[test]
    fn b1_b2_random_body_of_any_kind_is_refused_or_means_one_thing(
        kind in 0u16..64, serial: u32, body in proptest::collection::vec(any::<u8>(), 0..120), path in 0..3usize,
    ) {
        let path = [Path::Host, Path::Link, Path::Socket][path];
        let mut raw = MAGIC.to_vec();
        raw.extend(kind.to_le_bytes());
        raw.extend((body.len() as u16).to_le_bytes());
        raw.extend(serial.to_le_bytes());
        raw.extend([0; 4]);
        raw.extend(&body);
        match Envelope::decode(path, &raw) {
            Ok(said) => {
                prop_assert_eq!(said.encode(), raw);
            }
            Err(fault) => prop_assert!(["B-1", "B-2"].contains(&fault.clause)),
        }
    }

    #[test]
    fn b1_bytes_of_any_length_are_refused_without_a_panic(raw in proptest::collection::vec(any::<u8>(), 0..MESSAGE_MAX + 8)) {
        for path in [Path::Host, Path::Link, Path::Socket] {
            prop_assert!(Envelope::decode(path, &raw).is_err());
        }
    }
}
