// SPDX-License-Identifier: MIT OR Apache-2.0
//! A reader of safetensors files: the length of the header (8 bytes, little-endian), the header (an object of JSON that
//! has type, shape and place of each tensor), the data.
//!
//! It reads what [`crate::run`] needs and refuses all that is not such a file. The format's specification:
//! <https://huggingface.co/docs/safetensors>.

/// A tensor of a file: the type by the format's name (`"F32"`), and its bytes.
#[derive(Debug, PartialEq)]
pub struct Tensor<'a> {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub data: &'a [u8],
}

/// The tensors of a file, in the order of its header.
pub fn read(bytes: &[u8]) -> Result<Vec<Tensor<'_>>, String> {
    let (length, rest) = bytes.split_first_chunk::<8>().ok_or("it has no header")?;
    let length = usize::try_from(u64::from_le_bytes(*length)).ok().filter(|&n| n <= rest.len());
    let (header, data) = rest.split_at(length.ok_or("its header is longer than the file")?);
    let header = str::from_utf8(header).map_err(|_| "its header is not UTF-8")?;
    let mut text = Header(header);
    let Value::Object(entries) = text.value(0)? else { return Err("its header is no object".into()) };
    let of = |(name, value): (String, Value)| tensor(name, value, data);
    entries.into_iter().filter(|(name, _)| name != "__metadata__").map(of).collect()
}

fn tensor(name: String, value: Value, data: &[u8]) -> Result<Tensor<'_>, String> {
    let wrong = |what: &str| format!("tensor {name}: {what}");
    let Value::Object(fields) = value else { return Err(wrong("its entry is no object")) };
    let (mut dtype, mut shape, mut offsets) = (None, None, None);
    for (field, value) in fields {
        match (field.as_str(), value) {
            ("dtype", Value::Text(text)) => dtype = Some(text),
            ("shape", Value::List(list)) => shape = Some(list),
            ("data_offsets", Value::List(list)) => offsets = Some(list),
            (other, _) => return Err(wrong(&format!("{other:?} is not what it should be"))),
        }
    }
    let (Some(dtype), Some(shape), Some(offsets)) = (dtype, shape, offsets) else {
        return Err(wrong("no dtype, no shape or no data_offsets"));
    };
    let &[begin, end] = offsets.as_slice() else { return Err(wrong("data_offsets are not two numbers")) };
    let part = data.get(begin..end).ok_or_else(|| wrong("data_offsets are outside of the file"))?;
    let size = match dtype.as_str() {
        "F16" | "BF16" | "I16" | "U16" => Some(2),
        "F32" | "I32" | "U32" => Some(4),
        "F64" | "I64" | "U64" => Some(8),
        // Types that nobody reads here.
        _ => None,
    };
    let elements = shape.iter().try_fold(1, |n: usize, &extent| n.checked_mul(extent));
    if size.is_some_and(|size| elements.and_then(|n| n.checked_mul(size)) != Some(part.len())) {
        return Err(wrong(&format!("{} bytes, which are not those of {shape:?} elements of {dtype}", part.len())));
    }
    Ok(Tensor { name, dtype, shape, data: part })
}

/// Of JSON what such a header has: numbers are whole and not negative, lists have numbers alone.
enum Value {
    Text(String),
    List(Vec<usize>),
    Object(Vec<(String, Value)>),
}

/// The part of a header that is not read yet.
struct Header<'a>(&'a str);

impl Header<'_> {
    fn next(&mut self) -> Option<char> {
        self.0 = self.0.trim_start();
        self.0.chars().next()
    }

    fn takes(&mut self, c: char) -> bool {
        let found = self.next() == Some(c);
        if found {
            self.0 = &self.0[c.len_utf8()..];
        }
        found
    }

    fn expect(&mut self, c: char) -> Result<(), String> {
        if self.takes(c) {
            return Ok(());
        }
        let rest: String = self.0.chars().take(20).collect();
        Err(format!("its header has {rest:?}, expected {c:?}"))
    }

    /// What is in brackets, separated by commas.
    fn each(&mut self, close: char, mut item: impl FnMut(&mut Self) -> Result<(), String>) -> Result<(), String> {
        if self.takes(close) {
            return Ok(());
        }
        loop {
            item(self)?;
            if !self.takes(',') {
                return self.expect(close);
            }
        }
    }

    fn value(&mut self, depth: usize) -> Result<Value, String> {
        if self.takes('{') {
            // The header, a tensor.
            if depth == 2 {
                return Err("its header is nested too deep".into());
            }
            let mut fields = Vec::new();
            self.each('}', |text| {
                let name = text.text()?;
                text.expect(':')?;
                fields.push((name, text.value(depth + 1)?));
                Ok(())
            })?;
            return Ok(Value::Object(fields));
        }
        if self.takes('[') {
            let mut numbers = Vec::new();
            self.each(']', |text| {
                numbers.push(text.number()?);
                Ok(())
            })?;
            return Ok(Value::List(numbers));
        }
        self.text().map(Value::Text)
    }

    fn number(&mut self) -> Result<usize, String> {
        self.next();
        let end = self.0.find(|c: char| !c.is_ascii_digit()).unwrap_or(self.0.len());
        let (digits, rest) = self.0.split_at(end);
        self.0 = rest;
        digits.parse().map_err(|_| format!("its header has {digits:?}, expected a number of elements or bytes"))
    }

    fn text(&mut self) -> Result<String, String> {
        self.expect('"')?;
        let mut out = String::new();
        let mut chars = self.0.chars();
        loop {
            match chars.next().ok_or("its header ends within a string")? {
                '"' => break,
                '\\' => match chars.next().ok_or("its header ends within a string")? {
                    'n' => out.push('\n'),
                    't' => out.push('\t'),
                    'r' => out.push('\r'),
                    'b' => out.push('\u{8}'),
                    'f' => out.push('\u{c}'),
                    'u' => {
                        let digits: String = chars.by_ref().take(4).collect();
                        let code = u32::from_str_radix(&digits, 16).map_err(|_| "its header has a wrong \\u")?;
                        // Half of a pair: no name that is read here has one.
                        out.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
                    }
                    c => out.push(c),
                },
                c => out.push(c),
            }
        }
        self.0 = chars.as_str();
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
    }

    #[test]
    fn tensors_with_their_bytes() {
        let header = r#" {"__metadata__": {"made \"by\"": "a\u00e9\n{["}, "b":{"shape":[],"dtype":"F16","data_offsets":[8,10]},
            "a" : {"dtype":"F32", "shape":[2 ,1], "data_offsets":[0,8]}, "odd":{"dtype":"F8_E5M2","shape":[1],"data_offsets":[10,11]}}  "#;
        let data: Vec<u8> = (0..11).collect();
        let bytes = file(header, &data);
        let found = read(&bytes).unwrap();
        let names: Vec<_> = found.iter().map(|t| (t.name.as_str(), t.dtype.as_str(), &*t.shape, t.data)).collect();
        let expected: [(&str, &str, &[usize], &[u8]); 3] =
            [("b", "F16", &[], &data[8..10]), ("a", "F32", &[2, 1], &data[..8]), ("odd", "F8_E5M2", &[1], &data[10..])];
        assert_eq!(names, expected);
        assert_eq!(read(&file("{}", &[])), Ok(vec![]));
    }

    #[test]
    fn what_is_no_such_file_is_refused() {
        let of = |entry: &str| file(&format!("{{\"q\":{entry}}}"), &[0; 8]);
        for (bytes, text) in [
            (b"short".to_vec(), "it has no header"),
            ([&u64::MAX.to_le_bytes()[..], b"{}"].concat(), "its header is longer than the file"),
            (file("\"text\"", &[]), "its header is no object"),
            (file("{\"q\"}", &[]), "its header has \"}\", expected ':'"),
            (file("{\"q", &[]), "its header ends within a string"),
            (of("{\"a\":{\"b\":{}}}"), "its header is nested too deep"),
            (of("{\"dtype\":\"F32\",\"shape\":[2]}"), "tensor q: no dtype, no shape or no data_offsets"),
            (of("{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}"), "its header has \"\", expected a number"),
            (of("{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,9]}"), "tensor q: data_offsets are outside"),
            (of("{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[8,0]}"), "tensor q: data_offsets are outside"),
            (of("{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,8]}"), "tensor q: 8 bytes, which are not those"),
            (of("{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0]}"), "tensor q: data_offsets are not two"),
            (of("{\"dtype\":4,\"shape\":[2],\"data_offsets\":[0,8]}"), "its header has \"4,"),
        ] {
            let error = read(&bytes).unwrap_err();
            assert!(error.starts_with(text), "{error:?}, expected {text:?}");
        }
    }
}
