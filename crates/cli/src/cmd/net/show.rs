// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shows running interfaces, for people and for scripts.

use serde_json::Value;
use tombolo_net::Found;

use crate::{failure::Result, human, output};

const HEADS: [&str; 10] = ["INTERFACE", "NETNS", "STATE", "PEER", "MTU", "SENT", "RECEIVED", "BY", "PID", "CHANNEL"];

/// Prints a line for each interface.
pub fn list(found: &[Found], json: bool) -> Result<()> {
    if json {
        return found.iter().try_for_each(|found| output::json(&found.status));
    }
    let mut rows = vec![HEADS.map(String::from).to_vec()];
    rows.extend(found.iter().map(|found| row(&found.status)));
    output::print(&human::aligned(&rows).join("\n"))
}

fn row(status: &Value) -> Vec<String> {
    let channel = match status["ports"].as_array() {
        Some(ports) => format!("ports {}", names_of(ports).join(" ")),
        None => format!("{} {}", text(&status["role"]), text(&status["address"])),
    };
    let moved = |way: &str| human::bytes(status[way]["bytes"].as_u64().unwrap_or(0));
    vec![
        text(&status["interface"]),
        text(&status["netns"]),
        text(&status["state"]),
        text(&status["peer"]["domain"]),
        text(&status["mtu"]),
        moved("sent"),
        moved("received"),
        if status["by_rule"] == true { "rule" } else { "command" }.into(),
        text(&status["pid"]),
        channel,
    ]
}

fn names_of(ports: &[Value]) -> Vec<String> {
    ports.iter().map(|port| text(&port["interface"])).collect()
}

/// Prints all that is known of each interface.
pub fn all(found: &[Found], json: bool) -> Result<()> {
    if json {
        return list(found, true);
    }
    let blocks: Vec<String> = found.iter().map(|found| block(&found.status)).collect();
    output::print(&blocks.join("\n\n"))
}

fn block(status: &Value) -> String {
    let mut lines = vec![format!("{}: {}", text(&status["interface"]), text(&status["reason"]))];
    let mut line = |name: &str, value: String| lines.push(format!("  {name:<10} {value}"));
    if let Some(ports) = status["ports"].as_array() {
        line("address", format!("{}, MTU {}", text(&status["mac"]), text(&status["mtu"])));
        for port in ports {
            line("port", format!("{}, {}, {}", text(&port["interface"]), text(&port["state"]), text(&port["peer"])));
        }
        for way in ["sent", "received"] {
            let moved = &status[way];
            let [frames, bytes, dropped] = ["frames", "bytes", "dropped"].map(|what| text(&moved[what]));
            line(way, format!("{frames} frames, {bytes} bytes, {dropped} dropped"));
        }
        return lines.join("\n");
    }
    line("address", format!("{}, MTU {}", text(&status["mac"]), text(&status["mtu"])));
    line(
        "channel",
        format!("{} {}, process {}", text(&status["role"]), text(&status["address"]), text(&status["pid"])),
    );
    line("engine", text(&status["engine"]));
    if status["network"].is_string() {
        line("port of", text(&status["network"]));
    }
    line("links", format!("{}, the last for {} s", text(&status["links"]), text(&status["seconds"])));
    if status["peer"].is_object() {
        let peer = &status["peer"];
        let features: Vec<String> = peer["features"].as_array().into_iter().flatten().map(text).collect();
        line("peer", format!("{}, {}, MTU {}", text(&peer["domain"]), text(&peer["mac"]), text(&peer["mtu"])));
        line("it takes", if features.is_empty() { "plain frames".into() } else { features.join(" ") });
    }
    for way in ["sent", "received"] {
        let figures = &status[way];
        line(
            way,
            format!(
                "{} frames, {} bytes, {} segments, ring full {} times",
                text(&figures["frames"]),
                text(&figures["bytes"]),
                text(&figures["segments"]),
                text(&figures["full"])
            ),
        );
        let dropped = figures["dropped"].as_object().into_iter().flatten();
        let dropped: Vec<String> = dropped
            .filter(|(_, count)| count.as_u64() != Some(0))
            .map(|(why, count)| format!("{count} {why}"))
            .collect();
        if !dropped.is_empty() {
            line("  dropped", dropped.join(", "));
        }
    }
    lines.join("\n")
}

/// Returns a value as text for people.
fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}
