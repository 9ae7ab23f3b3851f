// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Computes rates from two looks at a pipe.

use std::{collections::HashMap, net::SocketAddr, time::Instant};

use serde::Serialize;
use tombolo_inspect::{Channel, Counters, Pipe, Socket};

/// Rates of a pipe's two endpoints, for each second.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize)]
pub struct Rates {
    pub bytes: f64,
    /// Messages of the writer, or calls that moved something.
    pub calls: f64,
    pub sleeps: f64,
    pub notifications_sent: f64,
    pub notifications_suppressed: f64,
    pub spins_paid: f64,
}

/// Counts of both endpoints since the channel began. Foreign processes may report any number.
type Totals = [u64; 6];

/// A channel and the rates of its pipes; `None` where the channel was not there before.
pub type Measured = (Channel, Option<[Rates; 2]>);

/// Bytes of a TCP connection for each second, both directions.
#[derive(Clone, Copy, PartialEq, Default, Debug, Serialize)]
pub struct Paths {
    pub shared: f64,
    pub tcp: f64,
}

/// Process and addresses that identify one endpoint of a TCP connection.
type EndOf = (u32, SocketAddr, SocketAddr);

/// State of the last look.
#[derive(Default)]
pub struct Meter {
    sockets: HashMap<EndOf, [u64; 2]>,
    last: Option<(Instant, HashMap<u64, [Totals; 2]>)>,
}

impl Meter {
    /// Returns the seconds since the last look, and the rates of the channels that were there then.
    pub fn measure(&mut self, channels: Vec<Channel>, now: Instant) -> (f64, Vec<Measured>) {
        let totals: HashMap<_, _> =
            channels.iter().map(|channel| (channel.id, [0, 1].map(|pipe| totals(&channel.pipes[pipe])))).collect();
        let last = self.last.replace((now, totals.clone()));
        let seconds = last.as_ref().map_or(0.0, |(then, _)| (now - *then).as_secs_f64());
        let rates = |id: &u64| {
            let before = last.as_ref()?.1.get(id)?;
            let after = totals.get(id)?;
            Some([0, 1].map(|pipe| Rates::between(&before[pipe], &after[pipe], seconds)))
        };
        let measured = channels.into_iter().map(|channel| {
            let rates = rates(&channel.id);
            (channel, rates)
        });
        (seconds, measured.collect())
    }

    /// Does the same for TCP connections.
    pub fn measure_sockets(&mut self, sockets: Vec<Socket>, seconds: f64) -> Vec<(Socket, Option<Paths>)> {
        let before = std::mem::take(&mut self.sockets);
        let measured = sockets.into_iter().map(|socket| {
            let end = (socket.pid, socket.own, socket.peer);
            let sum = |a: u64, b: u64| a.saturating_add(b);
            let now = [sum(socket.sent.shared, socket.received.shared), sum(socket.sent.tcp, socket.received.tcp)];
            self.sockets.insert(end, now);
            let rates = before.get(&end).map(|before| {
                let rate = |at: usize| now[at].saturating_sub(before[at]) as f64 / seconds.max(1e-6);
                Paths { shared: rate(0), tcp: rate(1) }
            });
            (socket, rates)
        });
        measured.collect()
    }
}

impl Rates {
    fn between(before: &Totals, after: &Totals, seconds: f64) -> Self {
        let seconds = seconds.max(1e-6);
        let rate = |which: usize| after[which].saturating_sub(before[which]) as f64 / seconds;
        let [bytes, calls, sleeps, notifications_sent, notifications_suppressed, spins_paid] =
            [0, 1, 2, 3, 4, 5].map(rate);
        Self { bytes, calls, sleeps, notifications_sent, notifications_suppressed, spins_paid }
    }
}

fn totals(pipe: &Pipe) -> Totals {
    let [writer, reader] = [pipe.writer, pipe.reader].map(|half| half.and_then(|half| half.counters));
    let both = |field: fn(&Counters) -> u64| [writer, reader].iter().flatten().map(field).fold(0, u64::saturating_add);
    let calls = writer.or(reader).map_or(0, |counted| counted.calls);
    [
        pipe.bytes.unwrap_or(0),
        calls,
        both(|counted| counted.sleeps),
        both(|counted| counted.notifications_sent),
        both(|counted| counted.notifications_suppressed),
        both(|counted| counted.spins_paid),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_differences_by_time_and_a_liar_is_no_trouble() {
        let rates = Rates::between(&[100, 10, 0, 0, 0, 9], &[300, 20, 0, 1, 0, 3], 2.0);
        assert_eq!((rates.bytes, rates.calls, rates.notifications_sent), (100.0, 5.0, 0.5));
        assert_eq!(rates.spins_paid, 0.0, "a counter that went back");
        let wild = Rates::between(&[0; 6], &[u64::MAX; 6], 0.0);
        assert!(wild.bytes.is_finite());
    }
}
