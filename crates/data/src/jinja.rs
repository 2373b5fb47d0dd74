//! Jinja with limits. A chat template is a program from somebody's model folder: minijinja's fuel bounds its steps,
//! but not what one step may build (a string doubled 36 times aborts the process). So the compiled instructions are
//! rewritten: after each one that makes a value comes a check of its size, and the few that can explode in one step
//! (`*`, `replace`, `join`, formatting) are replaced by guarded ones. A template too greedy ends in an error.
use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

use minijinja::machinery::{self, CodeGenerator, Instruction, Instructions, Token};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, UndefinedBehavior, Value};

use super::meter::{Meter, Tally};
use super::{print, python};

/// The largest template that is read.
pub const MAX_SOURCE: usize = 1 << 20;
/// How deep lists and maps may nest.
const MAX_DEPTH: usize = 64;
/// Instructions one rendering may take (a long chat needs some thousands), besides [`FUEL_A_BYTE`].
const FUEL: u64 = 5_000_000;
/// What each byte of the variables adds to them: a chat of many short messages needs some hundreds for each.
const FUEL_A_BYTE: u64 = 16;
/// Variables up to this size get no more fuel.
const SMALL_INPUT: usize = 256 << 10;
/// How long one rendering may compute; as long again for each [`BYTES_A_LIMIT`] of the variables.
const TIME_LIMIT: Duration = Duration::from_secs(1);
const BYTES_A_LIMIT: u32 = 32 << 20;
/// The most words and signs of one expression, with those of the expressions around it, and the most `elif` of one `if`:
/// the library's parser and compiler go down a level for each.
const MAX_CHAIN: usize = 4_000;
/// The stack of the thread that compiles.
const COMPILER_STACK: usize = 64 << 20;

/// What a running template may still build. One rendering stays on one thread, so this is thread-local.
#[derive(Clone, Copy)]
struct Budget {
    /// The largest single value, in bytes of text plus items.
    value: usize,
    /// What all values and the output together may still take.
    total: usize,
    /// How long it may still compute.
    meter: Meter,
    /// The two characters that enclose the text of a `{% generation %}` block in the output.
    marks: (char, char),
    /// What the template takes for the present.
    now: SystemTime,
}

thread_local! {
    static BUDGET: Cell<Option<Budget>> = const { Cell::new(None) };
    /// Whether a limit has stopped the last rendering.
    static STOPPED: Cell<bool> = const { Cell::new(false) };
    /// Whether the last rendering has called `raise_exception`.
    static RAISED: Cell<bool> = const { Cell::new(false) };
}

/// What the running template takes for the present.
pub fn now() -> SystemTime {
    BUDGET.get().map_or_else(SystemTime::now, |budget| budget.now)
}

/// An error raised by a limit or by a helper function.
pub fn failed(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// An error of a limit.
pub fn stopped(message: impl Into<String>) -> Error {
    STOPPED.set(true);
    failed(message)
}

/// The error of `raise_exception`.
pub fn raised(message: String) -> Error {
    RAISED.set(true);
    failed(message)
}

/// What an error of a rendering says of the template.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blame {
    /// A limit stopped the template, or it names what does not exist.
    Template,
    /// The template called `raise_exception`: it refuses the row.
    Row,
    /// The error alone does not tell.
    Unclear,
}

/// Who is to blame for the error of the last rendering on this thread.
pub fn blame(error: &Error) -> Blame {
    use ErrorKind::{OutOfFuel, TemplateNotFound, UnknownBlock, UnknownFilter, UnknownFunction, UnknownTest};
    let own = [OutOfFuel, TemplateNotFound, UnknownBlock, UnknownFilter, UnknownFunction, UnknownTest];
    let recursion = error.detail().is_some_and(|detail| detail.contains("recursion limit"));
    match () {
        () if STOPPED.get() || recursion || own.contains(&error.kind()) => Blame::Template,
        () if RAISED.get() => Blame::Row,
        () => Blame::Unclear,
    }
}

/// Fails if a value of `bytes` may not be built; called before the operations that multiply.
pub fn guard(bytes: Option<usize>) -> Result<(), Error> {
    let limit = BUDGET.get().map_or(usize::MAX, |budget| budget.value);
    match bytes {
        Some(bytes) if bytes <= limit => Ok(()),
        _ => Err(stopped(format!("the template builds a value larger than {limit} bytes"))),
    }
}

/// Takes `bytes` from what the rendering may still build, and looks at the clock. Filters and tests that the library calls for
/// each item of a list do so themselves: no instruction stands between two of these calls.
pub fn charge(bytes: usize) -> Result<(), Error> {
    let Some(mut budget) = BUDGET.get() else { return Ok(()) };
    if budget.meter.is_over() {
        return Err(stopped(format!("the template ran for more than {} s", budget.meter.seconds())));
    }
    budget.total =
        budget.total.checked_sub(bytes).ok_or_else(|| stopped("the template builds too much text in all"))?;
    BUDGET.set(Some(budget));
    Ok(())
}

/// The most that one step may compare, in items: some 50 nanoseconds each.
const MAX_COMPARED: usize = 1 << 24;

/// What it takes to look at a value whole: its items, and its text in pieces of what the machine compares at once.
pub fn weight(value: &Value) -> usize {
    let own = 1 + value.as_str().map_or(0, str::len) / 32;
    let items: usize = match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => value.try_iter().into_iter().flatten().map(|item| weight(&item)).sum(),
        ValueKind::Map => {
            let pairs = value.as_object().and_then(minijinja::value::DynObject::try_iter_pairs);
            pairs.into_iter().flatten().map(|(key, item)| weight(&key) + weight(&item)).sum()
        }
        _ => 0,
    };
    own + items
}

/// Fails if it would take too long to sort a value; called before the operations that do.
pub fn guard_sorting(value: &Value) -> Result<(), Error> {
    charge(0)?;
    measure(value)?;
    let items = value.len().unwrap_or(1).max(2);
    if weight(value).saturating_mul(items.ilog2() as usize + 1) <= MAX_COMPARED {
        return Ok(());
    }
    Err(stopped(format!("the template sorts a list of {items} items, which is too much for one step")))
}

/// The size of a value written out as a tree; an error if it nests too deeply or is over the limit.
pub fn measure(value: &Value) -> Result<usize, Error> {
    let limit = BUDGET.get().map_or(usize::MAX, |budget| budget.value);
    let mut size = 0;
    walk(value, 0, limit, &mut size)?;
    Ok(size)
}

fn walk(value: &Value, depth: usize, limit: usize, size: &mut usize) -> Result<(), Error> {
    *size += 1 + value.as_str().map_or(0, str::len);
    guard(Some(*size).filter(|&size| size <= limit))?;
    if depth > MAX_DEPTH {
        return Err(stopped(format!("the template nests values more than {MAX_DEPTH} deep")));
    }
    let Some(object) = value.as_object() else { return Ok(()) };
    if depth > 0 && is_namespace(value) {
        return Err(stopped("a namespace cannot be an item of another value"));
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()?.checked() {
                walk(&item?, depth + 1, limit, size)?;
            }
        }
        ValueKind::Map if depth > 0 || !is_namespace(value) => {
            for (key, item) in object.try_iter_pairs().into_iter().flatten() {
                walk(&key, depth + 1, limit, size)?;
                walk(&item, depth + 1, limit, size)?;
            }
        }
        _ => {}
    }
    Ok(())
}

fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// Follows every instruction that makes a value: a lazy sequence becomes a list (as in Python), the size is held
/// against the limits.
fn check(value: Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        guard(Some(text.len()))?;
        charge(text.len())?;
        return Ok(value);
    }
    if value.as_object().is_none() {
        charge(1)?;
        return Ok(value);
    }
    let size = measure(&value)?;
    charge(size + 32 * value.len().unwrap_or(1))?;
    if value.kind() == ValueKind::Iterable {
        return Ok(Value::from(value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?));
    }
    Ok(value)
}

/// Follows or precedes the instructions that may take long and make no new value: looks at the clock.
fn tick(value: Value) -> Result<Value, Error> {
    charge(0)?;
    Ok(value)
}

/// Precedes `{% set namespace.name = value %}`: namespaces inside namespaces could form a ring.
fn storable(value: Value) -> Result<Value, Error> {
    if is_namespace(&value) {
        return Err(stopped("a namespace cannot be stored in a namespace"));
    }
    Ok(value)
}

/// What `{% generation %}` blocks become: the text between two marks.
fn generation(text: &str) -> String {
    match BUDGET.get() {
        Some(Budget { marks: (open, close), .. }) => format!("{open}{text}{close}"),
        None => text.to_owned(),
    }
}

/// A compiled template.
pub struct Program {
    environment: Environment<'static>,
    instructions: Instructions<'static>,
    blocks: BTreeMap<&'static str, Instructions<'static>>,
    marks_generation: bool,
    tally: Tally,
}

impl Program {
    /// Parses and compiles with Hugging Face's settings (`trim_blocks`, `lstrip_blocks`, loop controls, `generation`).
    pub fn compile(source: &str) -> Result<Self, Error> {
        if source.len() > MAX_SOURCE {
            return Err(failed(format!("the template has {} bytes, the limit is {MAX_SOURCE}", source.len())));
        }
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let (source, marks_generation) = prepare(&source, &syntax)?;
        // A process compiles a handful of templates, which live as long as it does.
        let source: &'static str = Box::leak(source.into_boxed_str());
        let compile = || {
            let tree = machinery::parse(source, "chat_template", syntax)?;
            let mut generator = CodeGenerator::new("chat_template", source);
            generator.compile_stmt(&tree);
            let (instructions, blocks) = generator.finish();
            let blocks = blocks.iter().map(|(name, code)| (*name, bounded(code))).collect();
            Ok::<_, Error>((bounded(&instructions), blocks))
        };
        let (instructions, blocks) = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(COMPILER_STACK).spawn_scoped(scope, compile);
            let thread = thread.map_err(|error| failed("cannot start a thread").with_source(error))?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })?;
        Ok(Self { environment: environment(), instructions, blocks, marks_generation, tally: Tally::default() })
    }

    /// Whether the source has `{% generation %}` blocks.
    pub const fn marks_generation(&self) -> bool {
        self.marks_generation
    }

    /// Renders. `input_bytes` is the size of the variables: the limits grow with it. The text of each generation
    /// block comes enclosed in `marks`, and `now` is what `strftime_now` writes.
    pub fn render(
        &self,
        variables: Value,
        input_bytes: usize,
        marks: (char, char),
        now: SystemTime,
    ) -> Result<String, Error> {
        struct Reset;
        impl Drop for Reset {
            fn drop(&mut self) {
                BUDGET.set(None);
            }
        }
        let _reset = Reset;
        STOPPED.set(false);
        RAISED.set(false);
        let (began, before) = (Instant::now(), self.tally.before());
        let time = TIME_LIMIT * (1 + input_bytes as u32 / BYTES_A_LIMIT);
        let mut fuelled = None;
        if input_bytes > SMALL_INPUT {
            let environment = fuelled.insert(self.environment.clone());
            environment.set_fuel(Some(FUEL + FUEL_A_BYTE * input_bytes as u64));
        }
        let environment = fuelled.as_ref().unwrap_or(&self.environment);
        BUDGET.set(Some(Budget {
            value: input_bytes.saturating_mul(8).saturating_add(4 << 20),
            total: input_bytes.saturating_mul(128).saturating_add(64 << 20),
            meter: Meter::start(time, before),
            marks,
            now,
        }));
        let mut text = String::new();
        let mut output = machinery::make_string_output(&mut text);
        let done =
            machinery::eval(environment, &self.instructions, variables, &self.blocks, &mut output, AutoEscape::None);
        drop(output);
        // What fails has taken its time, too.
        let looked = BUDGET.get().and_then(|budget| budget.meter.since_look());
        let counted = self.tally.add((began, before), looked, input_bytes);
        done?;
        counted.map_err(stopped)?;
        Ok(text)
    }
}

/// Writes a value to the output; what counts is the text as it is written.
fn write(output: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    /// The most bytes that escaping makes of one.
    const ESCAPED: usize = 6;
    let escapes = !value.is_safe() && !matches!(state.auto_escape(), AutoEscape::None);
    if let Some(text) = value.as_str().filter(|_| !escapes) {
        guard(Some(text.len()))?;
        charge(text.len())?;
        return output.write_str(text).map_err(Error::from);
    }
    // Other values become about as long as they are large in memory.
    guard(measure(value)?.checked_mul(if escapes { ESCAPED } else { 1 }))?;
    let printed = print::text(value).map(Value::from);
    let mut text = String::new();
    minijinja::escape_formatter(
        &mut machinery::make_string_output(&mut text),
        state,
        printed.as_ref().unwrap_or(value),
    )?;
    guard(Some(text.len()))?;
    charge(text.len())?;
    output.write_str(&text).map_err(Error::from)
}

fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_debug(false);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(200);
    environment.set_formatter(write);
    environment.add_filter(CHECK, check);
    environment.add_filter(TICK, tick);
    environment.add_filter(STORABLE, storable);
    environment.add_filter(GENERATION, generation);
    python::install(&mut environment);
    environment
}

const CHECK: &str = "_check";
const TICK: &str = "_tick";
const STORABLE: &str = "_storable";
const GENERATION: &str = "_generation";
/// The filter that stands in for the operator `*`.
pub const MULTIPLY: &str = "_multiply";
/// The filter that stands in for the operator `~`.
pub const CONCAT: &str = "_concat";
/// The filter that stands in for the operator `%`.
pub const REMAINDER: &str = "_remainder";

/// Two changes of the source that need only its tokens: `generation` blocks become filter blocks, and `a * b` becomes
/// `a * _one * b`, which keeps the compiler from folding products of constants (it would build them unbounded).
fn prepare(source: &str, syntax: &SyntaxConfig) -> Result<(String, bool), Error> {
    let mut changed = String::with_capacity(source.len() + 64);
    let (mut copied, mut marks_generation) = (0, false);
    let (mut opens_block, mut ends_operand) = (false, false);
    let mut depth = Depth::default();
    for token in machinery::tokenize(source, false, syntax.clone()) {
        let (token, span) = token?;
        let range = span.start_offset as usize..span.end_offset as usize;
        depth.add(&token, opens_block)?;
        let replacement = match token {
            Token::Ident("generation") if opens_block => Some(format!("filter {GENERATION}")),
            Token::Ident("endgeneration") if opens_block => Some("endfilter".into()),
            Token::Mul if ends_operand => Some("* _one *".into()),
            _ => None,
        };
        if let Some(replacement) = replacement {
            marks_generation |= opens_block;
            changed.push_str(&source[copied..range.start]);
            changed.push_str(&replacement);
            copied = range.end;
        }
        opens_block = matches!(token, Token::BlockStart);
        ends_operand = matches!(
            token,
            Token::Ident(_)
                | Token::Str(_)
                | Token::String(_)
                | Token::Int(_)
                | Token::Int128(_)
                | Token::Float(_)
                | Token::ParenClose
                | Token::BracketClose
                | Token::BraceClose
        );
    }
    changed.push_str(&source[copied..]);
    Ok((changed, marks_generation))
}

/// How deep the tree of the syntax can be at a place, judged by the tokens before it: operators, filters, subscripts and
/// `elif` nest without brackets too.
#[derive(Default)]
struct Depth {
    /// Words and signs of each open bracket's expression, the outermost first.
    expressions: Vec<usize>,
    /// `elif` of each open `if`.
    branches: Vec<usize>,
}

impl Depth {
    fn add(&mut self, token: &Token<'_>, opens_block: bool) -> Result<(), Error> {
        match token {
            Token::TemplateData(_) => {}
            Token::BlockStart | Token::VariableStart => self.expressions = vec![0],
            Token::ParenOpen | Token::BracketOpen | Token::BraceOpen => self.expressions.push(1),
            Token::ParenClose | Token::BracketClose | Token::BraceClose => {
                self.expressions.pop();
                self.expressions.last_mut().into_iter().for_each(|count| *count += 1);
            }
            Token::Comma | Token::Colon => self.expressions.last_mut().into_iter().for_each(|count| *count = 0),
            _ => self.expressions.last_mut().into_iter().for_each(|count| *count += 1),
        }
        match token {
            Token::Ident("if") if opens_block => self.branches.push(0),
            Token::Ident("elif") if opens_block => self.branches.last_mut().into_iter().for_each(|count| *count += 1),
            Token::Ident("endif") if opens_block => drop(self.branches.pop()),
            _ => {}
        }
        if self.expressions.iter().chain(&self.branches).sum::<usize>() > MAX_CHAIN {
            return Err(failed(format!("an expression or an if has more than {MAX_CHAIN} parts")));
        }
        Ok(())
    }
}

/// Puts the checks between the instructions and moves the jump targets accordingly.
fn bounded<'source>(code: &Instructions<'source>) -> Instructions<'source> {
    /// No slot in the VM's small cache of filters.
    const UNCACHED: u8 = u8::MAX;
    let filter = |name, arguments| Instruction::ApplyFilter(name, Some(arguments), UNCACHED);
    let mut rewritten = Instructions::new(code.name(), code.source());
    let mut moved_to = Vec::new();
    let mut next = 0;
    for index in 0.. {
        moved_to.push(next);
        let Some(instruction) = code.get(index) else { break };
        let line = code.get_line(index).unwrap_or(0) as u16;
        let mut add = |instruction| next = rewritten.add_with_line(instruction, line) + 1;
        match instruction {
            // Raw text goes through the formatter, which counts it.
            Instruction::EmitRaw(text) => {
                // It is written as it stands, within `autoescape` too.
                add(Instruction::LoadConst(Value::from_safe_string((*text).to_owned())));
                add(Instruction::Emit);
            }
            Instruction::SetAttr(_) => {
                add(Instruction::Swap);
                add(filter(STORABLE, 1));
                add(Instruction::Swap);
                add(instruction.clone());
            }
            // An item of a text is found from its start; a loop or an assignment of several names may walk a text.
            Instruction::GetItem => {
                add(instruction.clone());
                add(filter(TICK, 1));
            }
            Instruction::PushLoop(_) | Instruction::UnpackList(_) => {
                add(filter(TICK, 1));
                add(instruction.clone());
            }
            Instruction::Mul => {
                add(filter(MULTIPLY, 2));
                add(filter(CHECK, 1));
            }
            Instruction::StringConcat => {
                add(filter(CONCAT, 2));
                add(filter(CHECK, 1));
            }
            Instruction::Rem => {
                add(filter(REMAINDER, 2));
                add(filter(CHECK, 1));
            }
            Instruction::Slice
            | Instruction::BuildMap(_)
            | Instruction::BuildList(_)
            | Instruction::BuildTuple(_)
            | Instruction::Add
            | Instruction::Sub
            | Instruction::Div
            | Instruction::IntDiv
            | Instruction::Pow
            | Instruction::Eq
            | Instruction::Ne
            | Instruction::Gt
            | Instruction::Gte
            | Instruction::Lt
            | Instruction::Lte
            | Instruction::In
            | Instruction::CompareAndPreserve(_)
            | Instruction::EndCapture
            | Instruction::ApplyFilter(..)
            | Instruction::PerformTest(..)
            | Instruction::CallFunction(..)
            | Instruction::CallMethod(..)
            | Instruction::CallObject(_) => {
                add(instruction.clone());
                add(filter(CHECK, 1));
            }
            _ => add(instruction.clone()),
        }
    }
    for index in 0..next {
        if let Some(
            Instruction::Jump(target)
            | Instruction::JumpIfFalse(target)
            | Instruction::JumpIfFalseOrPop(target)
            | Instruction::JumpIfTrueOrPop(target)
            | Instruction::Iterate(target)
            | Instruction::BuildMacro(_, target, _),
        ) = rewritten.get_mut(index)
        {
            *target = moved_to[*target as usize];
        }
    }
    rewritten
}
