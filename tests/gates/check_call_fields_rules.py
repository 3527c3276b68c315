#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/codegen/call_fields.py takes a field that a header gains everywhere, with one line in calls.py for a tensor and none for a number, and
refuses what it cannot read."""
import pathlib
import sys
import unittest
import unittest.mock

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools/codegen"))
import call_fields as generator  # noqa: E402
import calls  # noqa: E402

ENUM = """typedef enum flash3_side FLASH3_ENUM_INT32 {
  FLASH3_SIDE_LEFT = 0, /**< one */
  FLASH3_SIDE_FAR_RIGHT = 1
} flash3_side;
"""
FIELDS = """  int32_t side; /**< flash3_side, of each */
  /** 1: as it is. */
  int32_t plain;
  flash3_tensor slopes; /**< [heads_q] float32 */
"""


def with_tensors(**tensors):
    """calls.py with more tensors, {name: (calls, description)}."""
    added = {call: {**known, **{name: about for name, (calls_of, about) in tensors.items() if call in calls_of}}
             for call, known in calls.ADDED_TENSORS.items()}
    return unittest.mock.patch.object(calls, "ADDED_TENSORS", added)


def with_fields(text, call, fields):
    end = f"}} flash3_{call}_params;"
    assert text.count(end) == 1
    return text.replace(end, fields + end)


class Added(unittest.TestCase):
    def setUp(self):
        text = generator.header_text() + ENUM
        self.before, self.known = generator.Headers(text), calls.ADDED_TENSORS
        for call in ("forward", "backward"):
            text = with_fields(text, call, FIELDS)
        patch = with_tensors(slopes=(("forward", "backward"), calls.AddedTensor("heads", "float32")))
        patch.start()
        self.addCleanup(patch.stop)
        self.headers = generator.Headers(text)

    def made(self, make):
        return make(self.headers)

    def test_table(self):
        text = self.made(generator.field_table)
        self.assertEqual(text.count('FLASH3_FIELD(side, .words = "left far_right")'), 2)
        self.assertEqual(text.count("FLASH3_FIELD(plain, .is_flag = true)"), 2)
        self.assertEqual(text.count('FLASH3_FIELD(slopes, .dtype = FLASH3_FLOAT32, .shapes = "heads")'), 2)
        self.assertEqual(text.count('visit("slopes", &Params::slopes, problem.slopes.data, false)'), 2)

    def test_schemas(self):
        added = ", int side=0, bool plain=False, Tensor? slopes=None)"
        for operator, (call, _, options, _) in calls.TORCH.items():
            takes = call in ("forward", "backward") and "…" in options
            schema = generator.schema(self.headers, operator)
            self.assertEqual(schema.partition(" ->")[0].endswith(added), takes, schema)
            self.assertEqual(schema.replace(added, ")"), generator.schema(self.before, operator))

    def test_cpp(self):
        text = self.made(generator.cpp_structs)
        for line in ("flash3_side side = FLASH3_SIDE_LEFT;", "bool plain = false;", "Tensor slopes{};", "p.side = side;", "p.slopes = slopes;"):
            self.assertEqual(text.count(f"  {line}"), 2, line)

    def test_tvm_ffi(self):
        self.assertEqual(self.made(generator.tvm_signatures).count("side plain slopes"), 3)  # and of a call on a cache

    def test_what_a_list_places_comes_once(self):
        names = list(self.headers.expanded("forward", "q mask_alignment mask …", True))
        self.assertEqual(names, ["q", "mask_alignment", "mask", "max_logits", "side", "plain", "slopes"])

    def test_python(self):
        made = {}
        exec(self.made(generator.python_fields), made)
        self.assertEqual(made["WORDS"]["side"], {"left": 0, "far_right": 1})
        self.assertEqual(made["OPTIONS"]["backward"]["side"], "enumeration")
        self.assertIn("slopes", made["TENSORS"]["forward"])
        self.assertEqual(made["DTYPE_OF"]["slopes"], "float32")
        for function in made["SIGNATURES"].values():
            self.assertEqual([function[name] for name in ("side", "plain", "slopes")], ["left", False, None])
        self.assertEqual(made["ForwardParams"]._fields_[-1][0], "slopes")

    def test_results_are_for_given_memory_alone(self):
        text = with_fields(generator.header_text(), "forward", "  flash3_tensor most; /**< [heads_q] */\n")
        with unittest.mock.patch.object(calls, "ADDED_TENSORS", self.known), \
                with_tensors(most=(("forward",), calls.AddedTensor("rows", written=True))):
            headers = generator.Headers(text)
        self.assertTrue(generator.schema(headers, "forward_out").endswith("!)? most=None) -> ()"))
        self.assertEqual(generator.schema(headers, "forward"), generator.schema(self.before, "forward"))
        made = generator.python_fields(headers)
        self.assertEqual(made.count('"most": None'), 2)  # of attention and of attention_with_kv_cache

    def test_tensors_need_a_description(self):
        text = with_fields(generator.header_text(), "forward", "  flash3_tensor most;\n")
        with unittest.mock.patch.object(calls, "ADDED_TENSORS", self.known):
            with self.assertRaisesRegex(SystemExit, "forward_params.most is a tensor that calls.ADDED_TENSORS lacks"):
                generator.Headers(text)
            for shapes in ("", "heads tokens"):
                with with_tensors(most=(("forward",), calls.AddedTensor(shapes))), self.assertRaisesRegex(SystemExit, "most the shapes"):
                    generator.Headers(text)
            with with_tensors(none=(("forward",), calls.AddedTensor("heads"))), self.assertRaisesRegex(SystemExit, "none is no tensor"):
                generator.Headers(generator.header_text())

    def test_what_cannot_be_read(self):
        for field in ("double x;", "int32_t x, y;", "int32_t x[2];"):
            with self.assertRaises(SystemExit):
                generator.Headers(with_fields(generator.header_text(), "forward", f"  {field}\n"))


if __name__ == "__main__":
    unittest.main()
