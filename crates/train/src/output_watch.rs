//! Notices when others remove or replace the output directory or a file of the run. The run then saves its state and stops,
//! instead of losing hours or its metrics at the end.
use super::lock::DirLock;
use super::output;
use super::session::Session;
use tunesmith_base::error::{Error, Result};
use tunesmith_base::files;

/// Why a run stops whose output directory has gone.
pub const GONE: &str = "the output directory has gone";
/// Why a run stops one of whose files was removed or replaced.
pub const REPLACED: &str = "a file of the run was removed or replaced";

impl Session<'_> {
    /// Whether the output directory has gone. If so, a new one is made and the run is asked to stop: its state is saved there.
    ///
    /// # Errors
    /// A new one cannot be made.
    pub fn output_has_gone(&mut self) -> Result<bool> {
        let Some(lock) = self.lock.as_mut().filter(|lock| !lock.is_there()) else { return Ok(false) };
        let fail =
            |error: Error| error.context("the output directory was removed or moved, and no new one can be made");
        lock.refuse_link()?;
        let mut new = DirLock::acquire(&self.plan.output_dir).map_err(fail)?;
        new.keep();
        *lock = new;
        self.stop.request(GONE);
        // What was being written has gone, too.
        let _ = self.saver.join();
        if !self.sharing.shares_state() {
            // What was saved has gone with it. Ranks that save together have to agree on that, and do so at their next save.
            (self.begun, self.saved) = (0, 0);
        }
        Ok(true)
    }

    /// Asks the run to stop if one of its files was removed or replaced. The state can still be saved: checkpoints have folders
    /// of their own.
    pub fn check_files(&mut self) {
        self.replaced_file = self.replaced_file.take().or_else(|| self.find_replaced());
        if self.replaced_file.is_some() {
            self.stop.request(REPLACED);
        }
    }

    fn find_replaced(&self) -> Option<String> {
        let lock = self.lock.as_ref()?;
        let output_dir = &self.plan.output_dir;
        let stands = output::FILES.into_iter().find_map(|name| {
            let path = output_dir.join(name);
            let found = files::obstacle(&path)?;
            Some(format!("{found} stands at {}, where the run keeps a regular file", path.display()))
        });
        let gone = || {
            let metrics = self.metrics.as_ref().filter(|metrics| !metrics.is_in_place())?;
            Some(format!("{} was removed or replaced while the run wrote to it", metrics.path().display()))
        };
        // Where the whole directory has gone meanwhile, that is the news.
        stands.or_else(gone).filter(|_| lock.is_there())
    }
}
