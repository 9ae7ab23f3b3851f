// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The conformance suite on this backend, between two domains over the simulated Xen.

#[path = "support/pair.rs"]
mod pair;

use tombolo_domain_xen::{FakeXen, XenDomain};

use self::pair::{Pair, Side};

tombolo_testing::conformance!(pair());

/// Domains 5 and 7.
fn pair() -> Pair<XenDomain> {
    let xen = FakeXen::new();
    let side = |domain, other| Side { domain: xen.domain(domain), here: other, there: other };
    Pair::of(side(5, "7/"), side(7, "5/"), ())
}
