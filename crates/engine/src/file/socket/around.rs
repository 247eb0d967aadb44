//! What the dump of a socket takes besides the socket.

use torpor_images::ImageDir;

use crate::dump::pids::Pids;
use crate::dump::tasks::Task;
use crate::external::External;
use crate::file::table::FileTable;
use crate::guardian::Guardian;
use crate::namespace::Namespaces;
use crate::namespace::mount::TreeMounts;
use crate::namespace::user::IdMaps;
use crate::network::held::Held;
use crate::options::Network;

/// What sockets refer to.
#[derive(Debug)]
pub(crate) struct Around<'a> {
    /// Sockets that are left to the caller.
    pub external: &'a [External],
    /// The inode of the socket that the caller asks through.
    pub service: Option<u32>,
    /// What connections become.
    pub connections: &'a Network,
    /// Whether nothing may be left out.
    pub strict: bool,
    /// Where queues go.
    pub images: &'a ImageDir,
    /// Who may be at the other end.
    pub tasks: &'a [Task],
    /// What the images call them.
    pub pids: &'a Pids,
    /// Where sockets live.
    pub spaces: &'a Namespaces,
    /// Where the files lie that they are bound to.
    pub mounts: &'a TreeMounts,
    /// The ids of the tree's user namespace.
    pub id_maps: &'a IdMaps,
    /// Watches over connections while they are in repair mode.
    pub guardian: &'a Guardian,
    /// The descriptions so far, and those in flight.
    pub table: &'a mut FileTable,
    /// Holds the packets of connections back.
    pub network: &'a mut Held,
}
