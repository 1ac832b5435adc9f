"""Convert by llama.cpp's own converter: its sources' folder, then its arguments.

It knows tokenizers by a hash of what they make of one text, and so none of the embedded target, whose tokenizer is said
to be split like GPT-2's: the tests give tokens, and no text.
"""

import sys


def main() -> None:
    """Run the converter."""
    sources = sys.argv.pop(1)
    sys.path[:0] = [sources, f"{sources}/gguf-py"]
    import convert_hf_to_gguf
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
    convert_hf_to_gguf.main()


if __name__ == "__main__":
    main()
