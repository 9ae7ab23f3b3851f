// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `vm:NAME/SERVICE`: who has that name says the broker of this kernel where there is one, and to a domain of Xen's the
//! broker of dom0.

use tombolo_domain::{Deadline, Link, Listener, Rendezvous, Result};
use tombolo_domain_ivshmem::VmDomain;
use tombolo_domain_xen::XenNames;

/// Virtual machines by their names, whatever joins them.
#[derive(Debug)]
pub(crate) struct Vm {
    pub broker: VmDomain,
    pub xen: XenNames,
}

impl Vm {
    /// Whom to ask: a broker that the environment names; Xen's names where dom0 tells any; a broker whose socket is there.
    /// A domain of Xen's that has neither hears what to do in dom0, everybody else what to do here.
    fn way(&self) -> &dyn Rendezvous {
        let by_xen = !self.broker.is_named()
            && match self.xen.are_told() {
                Ok(told) => told || !self.broker.is_there(),
                Err(_) => false,
            };
        if by_xen { &self.xen } else { &self.broker }
    }
}

impl Rendezvous for Vm {
    fn scheme(&self) -> &'static str {
        self.broker.scheme()
    }

    fn listen(&self, service: &str) -> Result<Box<dyn Listener>> {
        self.way().listen(service)
    }

    fn connect(&self, service: &str, deadline: Deadline) -> Result<Box<dyn Link>> {
        self.way().connect(service, deadline)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use tombolo_domain::Error;
    use tombolo_domain_xen::{FakeXen, State, View};

    use super::*;

    /// What is said of a listener that is not there.
    fn said(vm: &Vm) -> String {
        let error = vm.connect("right/file", Deadline::NEVER).map(drop).expect_err("nobody listens");
        match &error {
            Error::Os { source, .. } => format!("{error}: {source}"),
            _ => error.to_string(),
        }
    }

    #[test]
    fn x20_names_come_from_dom0_unless_a_broker_is_named_or_is_all_there_is() {
        let (xen, folder) = (FakeXen::new(), tempfile::tempdir().expect("a folder"));
        let domain = xen.domain(5).names();
        let named = Vm { broker: VmDomain::through(folder.path().join("broker.sock")), xen: domain };
        assert!(said(&named).contains("start tombolod, or say with TOMBOLO_BROKER"), "{}", said(&named));
        if named.broker.is_named() && VmDomain::new().is_named() {
            panic!("the test's own environment names a broker");
        }
        let vm = Vm { broker: VmDomain::new(), xen: xen.domain(5).names() };
        assert_eq!(said(&vm).contains("dom0's tombolod has told"), !vm.broker.is_there(), "{}", said(&vm));
        let mut host = xen.host().expect("dom0");
        let name = |name: &str| name.parse().expect("a name");
        let view =
            |name| View { name, state: State::Running, ours: vec![], theirs: vec!["*".parse().expect("a pattern")] };
        let told = BTreeMap::from([(7, view(name("right")))]);
        host.tell(&[(5, (name("left"), told))].into()).expect("dom0 may");
        let vm = Vm { broker: VmDomain::new(), xen: xen.domain(5).names() };
        assert!(said(&vm).starts_with("nobody listens at vm:right/file:"), "{}", said(&vm));
    }
}
