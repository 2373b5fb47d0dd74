//! The settings of each kind of adapter: a file each, named in [`tunesmith_base::registry`]. Their formulas are in `model::adapters`.
use super::enums::Mode;

macro_rules! kinds {
    ($( $module:ident: $settings:ident = $mode:ident, $word:literal $( | $alias:literal ($alias_doc:literal) )?, $doc:literal; )*) => {
        $( pub mod $module; )*

        /// What the names of adapters' tensors begin with, behind the module's.
        pub const PREFIXES: &[&str] = &[$( $module::PREFIX ),*];

        /// Whether a mode with adapters trains rows of new tokens beside them; nothing for modes without adapters.
        pub const fn trains_tokens(mode: Mode) -> Option<bool> {
            match mode {
                $( Mode::$mode => Some($module::TRAINS_TOKENS), )*
                Mode::Full | Mode::Freeze => None,
            }
        }
    };
}
tunesmith_base::registry::adapters!(kinds);
