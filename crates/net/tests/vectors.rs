// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The golden vectors of `spec/vectors` for interfaces: they are decoded to the stated values, and encoded byte for
//! byte.

use serde_json::Value;
use tombolo_net::{Features, HEAD, HEADER, Hello, Limits, Mac};

fn vectors(name: &str) -> Vec<Value> {
    let path = format!("{}/../../spec/vectors/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let list: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert!(list.len() > 20, "vectors that say little");
    list
}

fn number(value: &Value) -> u64 {
    let text = value.as_str().expect("a number as a string");
    u64::from_str_radix(text.strip_prefix("0x").expect("hexadecimal"), 16).unwrap()
}

fn bytes(value: &Value) -> Vec<u8> {
    let hex = value.as_str().expect("hex");
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn n2_n3_n4_n5_n6_hellos_are_as_the_vectors_say() {
    for vector in vectors("net-hello") {
        let raw = bytes(&vector["hex"]);
        let decoded = Hello::decode(&raw);
        if let Some(clause) = vector["refused"].as_str() {
            let error = decoded.expect_err("a hello that must be refused").to_string();
            assert!(error.contains(&format!("({clause})")), "{error}: {vector}");
            continue;
        }
        let expected = Hello {
            features: Features::from_bits(number(&vector["features"])),
            mtu: number(&vector["mtu"]) as u32,
            frame_most: number(&vector["frame"]) as u32,
            mac: Mac(bytes(&vector["mac"]).try_into().unwrap()),
        };
        assert_eq!(expected.features.bits(), number(&vector["features"]), "{vector}");
        assert_eq!(decoded, Ok(expected), "{vector}");
        if vector["one_way"].is_null() {
            assert_eq!(expected.encode()[..], raw, "{vector}");
        }
    }
}

#[test]
fn n4_n6_n7_n8_frames_are_as_the_vectors_say() {
    for vector in vectors("net-frame") {
        let receiver = Hello {
            features: Features::from_bits(number(&vector["features"])),
            mtu: 1500,
            frame_most: 65_553,
            mac: Mac([2, 0, 0, 0, 0, 1]),
        };
        let before: [u8; HEAD] = bytes(&vector["hex"]).try_into().unwrap();
        let mut head = before;
        let limits = Limits::new(&receiver, Some(Mac([2, 0, 0, 0, 0, 2])));
        let len = number(&vector["len"]) as usize;
        match limits.check(len, &mut head) {
            Err(why) => assert_eq!(serde_json::to_value(why).unwrap(), vector["dropped"], "{vector}"),
            Ok(frame) => {
                assert_eq!((frame.len, frame.segments), (len - HEADER, before[1] != 0), "{vector}");
                assert_eq!(head[..HEADER], bytes(&vector["on"]), "{vector}");
                assert_eq!(head[HEADER..], before[HEADER..], "{vector}");
            }
        }
    }
}
