// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The golden vectors of `spec/vectors`, in both directions: they are decoded to the stated values, and encoded byte
//! for byte.

use serde_json::Value;
use tombolo_layout::{
    Features, SegmentHeader,
    handshake::{self, Greeting, Message, Refusal},
    header, limits, record,
    state::{Phase, State},
    words,
};

fn vectors(name: &str) -> Value {
    let path = format!("{}/../../../spec/vectors/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    serde_json::from_str(&text).unwrap()
}

fn list(value: &Value) -> &[Value] {
    let list = value.as_array().expect("a list");
    assert!(!list.is_empty(), "vectors that say nothing");
    list
}

fn number(value: &Value) -> u64 {
    let text = value.as_str().expect("a number as a string");
    u64::from_str_radix(text.strip_prefix("0x").expect("hexadecimal"), 16).unwrap()
}

fn small<T: TryFrom<u64, Error: std::fmt::Debug>>(value: &Value) -> T {
    T::try_from(value.as_u64().unwrap_or_else(|| number(value))).unwrap()
}

fn bytes(value: &Value) -> Vec<u8> {
    let hex = value["hex"].as_str().expect("hex");
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn m1_m2_m3_m4_headers_are_as_the_vectors_say() {
    for vector in list(&vectors("segment-header")) {
        let raw: [u8; header::LEN] = bytes(vector).try_into().unwrap();
        let decoded = SegmentHeader::decode(&raw, number(&vector["memory"]));
        if let Some(clause) = vector["refused"].as_str() {
            assert_eq!(decoded.map_err(|error| error.clause), Err(clause), "{vector}");
            continue;
        }
        let field = |name: &str| number(&vector["fields"][name]);
        let expected = SegmentHeader {
            generation: field("generation") as u16,
            segment_len: field("segment_len"),
            data_offset: field("data_offset"),
            capacity: field("capacity"),
            start: field("start"),
            features: Features(field("features")),
            epoch: field("epoch"),
        };
        assert_eq!(decoded, Ok(expected), "{vector}");
        assert_eq!(expected.encode(), raw, "{vector}");
    }
}

#[test]
fn m5_c12_words_stand_where_the_vectors_say() {
    let vector = vectors("word-offset");
    for (name, offset) in [
        ("tail", words::TAIL),
        ("head", words::HEAD),
        ("want_data", words::WANT_DATA),
        ("reader_state", words::READER_STATE),
        ("want_space", words::WANT_SPACE),
        ("writer_state", words::WRITER_STATE),
        ("cpu", words::CPU),
        ("reserved", words::RESERVED),
        ("writer_counters", words::WRITER_COUNTERS),
        ("ring_growth", words::RING_GROWTH),
        ("reader_counters", words::READER_COUNTERS),
        ("peer_epoch", words::PEER_EPOCH),
        ("smallest data_offset", limits::CONTROL_LEN as usize),
    ] {
        assert_eq!(number(&vector[name]), offset as u64, "{name}");
    }
}

fn greeting(value: &Value) -> Greeting {
    Greeting {
        version_min: small(&value["version_min"]),
        version_max: small(&value["version_max"]),
        offered: Features(number(&value["offered"])),
        required: Features(number(&value["required"])),
        epoch: number(&value["epoch"]),
        map_limit: number(&value["map_limit"]),
    }
}

fn refusal(code: u64) -> Refusal {
    use Refusal::{Denied, Feature, Malformed, Quota, Segment, Unknown, Version};
    [Unknown, Version, Feature, Segment, Malformed, Quota, Denied][code as usize]
}

#[test]
fn c2_c3_c4_c5_h1_control_messages_are_as_the_vectors_say() {
    for vector in list(&vectors("control-message")) {
        let raw = bytes(vector);
        let decoded = Message::decode(&raw);
        if let Some(clause) = vector["refused"].as_str() {
            assert_eq!(decoded.map_err(|error| error.clause), Err(clause), "{vector}");
            continue;
        }
        let expected = if vector["hello"].is_object() {
            Message::Hello(greeting(&vector["hello"]))
        } else if vector["welcome"].is_object() {
            Message::Welcome(greeting(&vector["welcome"]))
        } else if vector["refuse"].is_object() {
            let refuse = &vector["refuse"];
            Message::Refuse(refusal(small(&refuse["code"])), refuse["reason"].as_str().unwrap().into())
        } else {
            let ring = &vector["ring"];
            Message::Ring { generation: small(&ring["generation"]), epoch: number(&ring["epoch"]) }
        };
        assert_eq!(decoded.as_ref(), Ok(&expected), "{vector}");
        if vector["one_way"] != Value::Bool(true) {
            assert_eq!(expected.encode(), raw, "{vector}");
        }
    }
}

#[test]
fn c6_versions_stand_in_the_same_place_of_every_message_that_is_long_enough() {
    let mut message = [0xff; 14];
    message[10..].copy_from_slice(&[0x03, 0x01, 0x09, 0x02]);
    assert_eq!(handshake::versions(&message), Some((0x0103, 0x0209)));
    assert_eq!(handshake::versions(&message[..13]), None);
}

#[test]
fn r20_record_headers_are_as_the_vectors_say() {
    for vector in list(&vectors("record-header")) {
        let raw: [u8; 8] = bytes(vector).try_into().unwrap();
        let decoded = record::decode(raw);
        if vector["refused"].is_string() {
            assert_eq!(decoded, None, "{vector}");
            continue;
        }
        let len = number(&vector["len"]) as u32;
        assert_eq!((decoded, record::encode(len)), (Some(len), raw), "{vector}");
        assert_eq!(record::span(len.into()), number(&vector["span"]), "{vector}");
    }
}

#[test]
fn r10_r11_r14_wait_words_and_cpu_hints_are_as_the_vectors_say() {
    let vector = vectors("wait-word");
    for armed in list(&vector["armed"]) {
        assert_eq!(words::armed(number(&armed["target"])), number(&armed["word"]), "{armed}");
    }
    for reached in list(&vector["reached"]) {
        let (word, position) = (number(&reached["word"]), number(&reached["position"]));
        assert_eq!(Value::Bool(words::reached(word, position)), reached["reached"], "{reached}");
    }
    for cpu in list(&vector["cpu"]) {
        assert_eq!(words::encode_cpu(small(&cpu["cpu"])), number(&cpu["word"]), "{cpu}");
    }
}

#[test]
fn r15_state_words_are_as_the_vectors_say() {
    let phase = |value: &Value| [Phase::Fresh, Phase::Open, Phase::Closed, Phase::Aborted][small::<usize>(value)];
    let vector = vectors("state-word");
    for said in list(&vector["words"]) {
        let state =
            State { phase: phase(&said["phase"]), ready: small(&said["ready"]), current: small(&said["current"]) };
        let word = number(&said["word"]);
        assert_eq!((state.encode(), State::decode(word)), (word, Some(state)), "{said}");
    }
    for word in list(&vector["refused"]) {
        assert_eq!(State::decode(number(word)), None, "{word}");
    }
    for step in list(&vector["phases"]) {
        let allowed = phase(&step["from"]).may_become(phase(&step["to"]));
        assert_eq!(Value::Bool(allowed), step["allowed"], "{step}");
    }
}

#[test]
#[should_panic(expected = "left == right")]
fn m1_canary_vector_with_one_bit_changed_is_noticed() {
    let all = vectors("segment-header");
    let mut raw: [u8; header::LEN] = bytes(&list(&all)[0]).try_into().unwrap();
    raw[0x38] ^= 1;
    let header = SegmentHeader::decode(&raw, number(&all[0]["memory"])).unwrap();
    assert_eq!(header.epoch, number(&all[0]["fields"]["epoch"]));
}

/// The fuzzer begins with known cases: `TOMBOLO_SEEDS=fuzz/corpus cargo test … seeds` writes them there.
#[test]
fn seeds_of_the_fuzzer_are_the_vectors() {
    let folder = std::env::var("TOMBOLO_SEEDS").unwrap_or_else(|_| env!("CARGO_TARGET_TMPDIR").into());
    for (target, name) in [("segment_header", "segment-header"), ("control_message", "control-message")] {
        let folder = format!("{folder}/{target}");
        std::fs::create_dir_all(&folder).unwrap();
        for (index, vector) in list(&vectors(name)).iter().enumerate() {
            std::fs::write(format!("{folder}/vector-{index}"), bytes(vector)).unwrap();
        }
        assert!(std::fs::read_dir(&folder).unwrap().count() >= list(&vectors(name)).len());
    }
}
