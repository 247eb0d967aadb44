//! Images that are complete, and clients that ask for what they like.

use std::time::Duration;

use torpor_images::pagemap::PagemapWriter;
use torpor_images::proto::InventoryEntry;

use super::super::images::serve_images_within;
use super::*;

const FIRST: u64 = 0x5000;

/// Images of task 7: two pages, one of zeros, a gap, and one page more.
fn images(dir: &Path) {
    let images = ImageDir::open(dir).unwrap();
    let mut map = PagemapWriter::create(&images, kind::PAGEMAP, 7, 1).unwrap();
    map.push(run(FIRST, 2, true)).unwrap();
    map.push(run(FIRST + 0x2000, 1, false)).unwrap();
    map.push(run(FIRST + 0x4000, 1, true)).unwrap();
    map.finish().unwrap();
    let mut file = images.raw_file_create(kind::PAGES, 1).unwrap();
    file.write_all(&[[1; 4096], [2; 4096], [3; 4096]].concat()).unwrap();
    let inventory = InventoryEntry {
        img_version: 2,
        dump_criu_run_id: Some("seven".to_owned()),
        ..InventoryEntry::default()
    };
    images.write_one(kind::INVENTORY, 0, &inventory).unwrap();
}

/// Serves them at a port of this host to `client`.
fn serve_to<T>(dir: &Path, client: impl FnOnce(&PageServer) -> T) -> (T, Result<()>) {
    serve_patiently(dir, Duration::from_mins(1), client)
}

fn serve_patiently<T>(
    dir: &Path,
    patience: Duration,
    client: impl FnOnce(&PageServer) -> T,
) -> (T, Result<()>) {
    images(dir);
    let server = PageServer::default();
    let listener = Listener::new(&server).unwrap();
    let to = PageServer { port: listener.port().unwrap(), ..PageServer::default() };
    std::thread::scope(|scope| {
        let served = scope.spawn(|| {
            let opts = Options { images_dir: dir.to_owned(), ..Options::default() };
            serve_images_within(&opts, listener, patience)
        });
        (client(&to), served.join().unwrap())
    })
}

/// What a client gets that says this.
fn answer(to: &PageServer, commands: &[Command]) -> Vec<u8> {
    let mut socket = TcpStream::connect(("127.0.0.1", to.port)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut said = Vec::new();
    commands.iter().for_each(|command| command.send(&mut said).unwrap());
    socket.write_all(&said).unwrap();
    let mut bytes = Vec::new();
    socket.read_to_end(&mut bytes).unwrap();
    bytes
}

#[test]
fn a_restore_gets_what_follows_in_one_piece() {
    let dir = tempfile::tempdir().unwrap();
    let (got, served) = serve_to(dir.path(), |to| {
        let mut pager = Borrower::connect(to, "seven", None).unwrap();
        // What is needed at once goes over a connection of its own.
        let fetcher = Fetcher::connect(to, "seven", None).unwrap();
        let mut at_once = vec![0; 3 * 4096];
        fetcher.read(7, FIRST, &mut at_once).unwrap();
        fetcher.end();
        let mut buffer = Vec::new();
        pager.ask(Request { id: 7, range: FIRST + 0x1000..FIRST + 0x5000 }).unwrap();
        pager.flush().unwrap();
        let got = pager.receive(&mut buffer).unwrap().range;
        pager.close(&mut buffer).unwrap();
        (at_once, got, buffer[..2 * 4096].to_vec())
    });
    served.unwrap();
    let (at_once, range, bytes) = got;
    assert_eq!(at_once, [[1; 4096], [2; 4096], [0; 4096]].concat());
    // Not beyond the gap.
    assert_eq!(range, FIRST + 0x1000..FIRST + 0x3000);
    assert_eq!(bytes, [[2; 4096], [0; 4096]].concat());
}

#[test]
fn what_is_not_there_is_not_given_and_hurts_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let get = |id: u64, vaddr: u64, pages: u32| {
        let object = Some(Object { kind: kind::PAGEMAP, id });
        Command { op: Op::Get, flags: 0, pages, vaddr, object }
    };
    let ((), served) = serve_to(dir.path(), |to| {
        let mut pager = Borrower::connect(to, "seven", None).unwrap();
        let wrong = [
            get(8, FIRST, 1),
            get(7, FIRST + 1, 1),
            get(7, FIRST + 0x3000, 1),
            get(7, FIRST, 0),
            get(7, u64::MAX - 0xfff, u32::MAX),
            get(u64::MAX, FIRST, 1),
            Command::bare(Op::Open, Some(Object { kind: kind::PAGEMAP, id: 9 })),
            Command::bare(Op::Abandon, None),
            // That there is nothing more to be served.
            Command::bare(Op::Close, None),
        ];
        for command in wrong {
            assert!(answer(to, &[command]).is_empty(), "{command:?}");
        }
        let mut buffer = Vec::new();
        pager.ask(Request { id: 7, range: FIRST..FIRST + 0x1000 }).unwrap();
        pager.flush().unwrap();
        assert_eq!(pager.receive(&mut buffer).unwrap().range, FIRST..FIRST + 0x1000);
        pager.close(&mut buffer).unwrap();
    });
    served.unwrap();
    // Nothing was written by those who wanted to.
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 3);
}

#[test]
fn a_restore_of_other_images_gets_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (asked, served) = serve_to(dir.path(), |to| Borrower::connect(to, "eight", None).map(drop));
    let asked = asked.unwrap_err().to_string();
    assert!(asked.contains("of other images than these"), "{asked}");
    assert!(served.unwrap_err().to_string().contains("the restore on the other end has failed"));
}

/// A client that has got the first page, which anybody can ask for, and says nothing more.
fn stranger(to: &PageServer) -> TcpStream {
    let mut socket = TcpStream::connect(("127.0.0.1", to.port)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let object = Some(Object { kind: kind::PAGEMAP, id: 7 });
    let get = Command { op: Op::Get, flags: 0, pages: 1, vaddr: FIRST, object };
    let mut said = vec![];
    get.send(&mut said).unwrap();
    socket.write_all(&said).unwrap();
    socket.read_exact(&mut [0; Command::SIZE + 4096]).unwrap();
    socket
}

/// Whether the server has let a client go.
fn is_let_go(mut client: &TcpStream) -> bool {
    client.read(&mut [0]).unwrap() == 0
}

/// However many come: they neither use up what the server has, nor keep it from coming to its end.
#[test]
fn strangers_that_stay_are_few_and_keep_nobody_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let (strangers, served) = serve_to(dir.path(), |to| {
        let mut pager = Borrower::connect(to, "seven", None).unwrap();
        // One more than there is room for, beside the restore.
        let strangers: Vec<TcpStream> = (0..64).map(|_| stranger(to)).collect();
        assert!(is_let_go(&strangers[0]));
        let mut buffer = Vec::new();
        pager.ask(Request { id: 7, range: FIRST..FIRST + 0x1000 }).unwrap();
        pager.flush().unwrap();
        assert_eq!(pager.receive(&mut buffer).unwrap().range, FIRST..FIRST + 0x1000);
        pager.close(&mut buffer).unwrap();
        strangers
    });
    served.unwrap();
    assert!(strangers.iter().all(is_let_go));
}

#[test]
fn a_stranger_that_falls_silent_is_let_go() {
    let dir = tempfile::tempdir().unwrap();
    let (gone, _) =
        serve_patiently(dir.path(), Duration::from_millis(50), |to| is_let_go(&stranger(to)));
    assert!(gone);
}

/// It may be stopped, and its host may sleep.
#[test]
fn a_restore_may_be_silent_for_as_long_as_it_likes() {
    let dir = tempfile::tempdir().unwrap();
    let (_, served) = serve_patiently(dir.path(), Duration::from_millis(50), |to| {
        let mut pager = Borrower::connect(to, "seven", None).unwrap();
        // Until one that came later was let go for its silence.
        assert!(is_let_go(&stranger(to)));
        let mut buffer = Vec::new();
        pager.ask(Request { id: 7, range: FIRST..FIRST + 0x1000 }).unwrap();
        pager.flush().unwrap();
        pager.receive(&mut buffer).unwrap();
        pager.close(&mut buffer).unwrap();
    });
    served.unwrap();
}
