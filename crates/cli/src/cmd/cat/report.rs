// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reports on a direction at its end.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{failure::print_line, human};

/// One direction of a session that ended well.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Report {
    pub direction: Direction,
    pub bytes: u64,
    /// Seconds since the two endpoints had met.
    pub seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    Sent,
    Received,
}

impl Direction {
    pub fn name(self) -> &'static str {
        match self {
            Self::Sent => "sent",
            Self::Received => "received",
        }
    }
}

impl Report {
    pub fn print_report(&self, json: bool) {
        print_line(&if json { serde_json::to_string(self).unwrap_or_default() } else { self.text() });
    }

    fn text(&self) -> String {
        let rate = human::rate(self.bytes as f64 / self.seconds.max(1e-9));
        let time = human::seconds(Duration::from_secs_f64(self.seconds));
        let digest = self.sha256.as_ref().map_or(String::new(), |digest| format!(", SHA-256 {digest}"));
        format!("{} {} bytes in {time} ({rate}){digest}", self.direction.name(), self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn report_is_one_line_with_the_digest() {
        let report = Report { direction: Direction::Sent, bytes: 1500, seconds: 0.5, sha256: Some("ab".into()) };
        assert_eq!(report.text(), "sent 1500 bytes in 0.50 s (3.00 kB/s), SHA-256 ab");
        let json = serde_json::to_string(&report).unwrap();
        assert_eq!(json, r#"{"direction":"sent","bytes":1500,"seconds":0.5,"sha256":"ab"}"#);
    }
}
