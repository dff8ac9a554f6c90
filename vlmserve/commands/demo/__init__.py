"""`vlmserve demo`: a page to chat with a served model about pictures and videos, or to search pictures. Only `page` and
`search_tab` need Gradio."""
