//! Jinja with limits on time and memory. A chat template is a program from an untrusted model folder. minijinja's fuel
//! bounds its steps, but not the size of values: a string doubled 36 times would abort the process.
//!
//! So the compiled instructions are rewritten. After each one that makes a value, its size is checked. The few that can
//! explode in one step (`*`, `replace`, `join`, formatting) become guarded filters. A template beyond a limit fails
//! with an error.
use std::collections::BTreeMap;
use std::time::{Instant, SystemTime};

use minijinja::machinery::{self, CodeGenerator, Instruction, Instructions, Token};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{AutoEscape, Environment, Error, Output, State, UndefinedBehavior, Value};

use super::jinja_compat::{self, CONCAT, MULTIPLY, REMAINDER};
use super::jinja_limits::{
    GenerationMarks, Limits, charge, failed, generation_marks, guard, is_namespace, measure, stopped, stopped_by_time,
    time_since_first_read,
};
use super::python_text;
use super::template_time::TotalTime;

/// The largest template, in bytes.
pub const MAX_SOURCE: usize = 1 << 20;
/// Instructions that one rendering may execute, besides [`FUEL_A_BYTE`]. A long chat needs some thousands.
const FUEL: u64 = 5_000_000;
/// More instructions for each byte of the variables. A chat of many short messages needs some hundreds per message.
const FUEL_A_BYTE: u64 = 16;
/// Variables up to this size, in bytes, add no fuel.
const SMALL_INPUT: usize = 256 << 10;
/// The most tokens of an expression with those around it, plus the most `elif` of an `if`. minijinja's parser and
/// compiler may recurse once for each.
const MAX_CHAIN: usize = 4_000;
/// The stack of the thread that compiles, in bytes.
const COMPILER_STACK: usize = 64 << 20;

/// Runs after every instruction that makes a value. Checks the size, and turns a lazy sequence into a list, as in
/// Python.
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

/// Runs before or after instructions that may take long but make no value. Checks the time.
fn tick(value: Value) -> Result<Value, Error> {
    charge(0)?;
    Ok(value)
}

/// Runs before `{% set namespace.name = value %}`. A namespace in a namespace could form a cycle.
fn storable(value: Value) -> Result<Value, Error> {
    if is_namespace(&value) {
        return Err(stopped("a namespace cannot be stored in a namespace"));
    }
    Ok(value)
}

/// The filter that replaces `{% generation %}` blocks: puts the text between two marks.
fn generation(text: &str) -> String {
    match generation_marks() {
        Some(GenerationMarks { open, close }) => format!("{open}{text}{close}"),
        None => text.to_owned(),
    }
}

/// A compiled template, whose instructions check their results.
pub struct Program {
    environment: Environment<'static>,
    instructions: Instructions<'static>,
    blocks: BTreeMap<&'static str, Instructions<'static>>,
    marks_generation: bool,
    total_time: TotalTime,
}

impl Program {
    /// Parses and compiles with the settings of Transformers (`trim_blocks`, `lstrip_blocks`, loop controls,
    /// `generation`).
    ///
    /// # Errors
    /// The source is too large, not valid Jinja, or nested too deeply; a thread cannot be started.
    pub fn compile(source: &str) -> Result<Self, Error> {
        if source.len() > MAX_SOURCE {
            return Err(failed(format!("the template has {} bytes, the limit is {MAX_SOURCE}", source.len())));
        }
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        let source = source.replace("\r\n", "\n").replace('\r', "\n");
        let (source, marks_generation) = prepare(&source, &syntax)?;
        // A process compiles only a few templates and needs them until it ends.
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
        Ok(Self {
            environment: environment(),
            instructions,
            blocks,
            marks_generation,
            total_time: TotalTime::default(),
        })
    }

    /// Whether the source has `{% generation %}` blocks.
    pub const fn marks_generation(&self) -> bool {
        self.marks_generation
    }

    /// Uses up the time that all renderings together may take: each one then fails, unless it fails otherwise.
    #[cfg(test)]
    pub fn use_up_time(&self) {
        self.total_time.use_up();
    }

    /// Renders the template. The limits grow with `input_bytes`, the size of the variables. In the output, `marks`
    /// enclose the text of each generation block. `now` is the time for `strftime_now`.
    ///
    /// # Errors
    /// The template fails, or exceeds a limit ([`super::jinja_limits::blame`]).
    pub fn render(
        &self,
        variables: Value,
        input_bytes: usize,
        marks: GenerationMarks,
        now: SystemTime,
    ) -> Result<String, Error> {
        let began = Instant::now();
        let thread_time_before = self.total_time.thread_time_before();
        let mut fuelled = None;
        if input_bytes > SMALL_INPUT {
            let environment = fuelled.insert(self.environment.clone());
            environment.set_fuel(Some(FUEL + FUEL_A_BYTE * input_bytes as u64));
        }
        let environment = fuelled.as_ref().unwrap_or(&self.environment);
        let _limits = Limits::start(input_bytes, thread_time_before, marks, now);
        let mut text = String::new();
        let mut output = machinery::make_string_output(&mut text);
        let done =
            machinery::eval(environment, &self.instructions, variables, &self.blocks, &mut output, AutoEscape::None);
        drop(output);
        // A rendering that fails counts too.
        let counted = self.total_time.add(began, thread_time_before, time_since_first_read(), input_bytes);
        done?;
        counted.map_err(stopped_by_time)?;
        Ok(text)
    }
}

/// Writes a value to the output, and charges for the written text.
fn write(output: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    /// The most bytes that escaping makes of one byte.
    const ESCAPED: usize = 6;
    let escapes = !value.is_safe() && !matches!(state.auto_escape(), AutoEscape::None);
    if let Some(text) = value.as_str().filter(|_| !escapes) {
        guard(Some(text.len()))?;
        charge(text.len())?;
        return output.write_str(text).map_err(Error::from);
    }
    // The text of any other value is about as long as its size.
    guard(measure(value)?.checked_mul(if escapes { ESCAPED } else { 1 }))?;
    let printed = python_text::text(value).map(Value::from);
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
    jinja_compat::install(&mut environment);
    environment
}

const CHECK: &str = "_check";
const TICK: &str = "_tick";
const STORABLE: &str = "_storable";
const GENERATION: &str = "_generation";

/// Changes the source in two ways. `generation` blocks become filter blocks with a scope. `a * b` becomes `a * _one * b`, so the
/// compiler cannot fold a product of constants, whose size nothing would bound.
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
            // As in Transformers, the block is a scope: what it sets ends with it.
            Token::Ident("generation") if opens_block => Some(format!("filter {GENERATION} %}}{{% with")),
            Token::Ident("endgeneration") if opens_block => Some("endwith %}{% endfilter".into()),
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

/// An upper bound of the depth of the syntax tree, from the tokens so far. Operators, filters, subscripts and `elif`
/// nest without brackets too.
#[derive(Default)]
struct Depth {
    /// The tokens of the expression in each open bracket, the outermost first.
    expressions: Vec<usize>,
    /// The number of `elif` in each open `if`.
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

/// Inserts the checks between the instructions, and adjusts the jump targets.
fn bounded<'source>(code: &Instructions<'source>) -> Instructions<'source> {
    /// Keeps the filter out of the VM's cache, which has few slots.
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
            // Raw text goes through the formatter, which charges for it.
            Instruction::EmitRaw(text) => {
                // A safe string is never escaped, not even within `autoescape`.
                add(Instruction::LoadConst(Value::from_safe_string((*text).to_owned())));
                add(Instruction::Emit);
            }
            Instruction::SetAttr(_) => {
                add(Instruction::Swap);
                add(filter(STORABLE, 1));
                add(Instruction::Swap);
                add(instruction.clone());
            }
            // These can take time in proportion to a string: an index, a loop, an assignment to several names.
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
