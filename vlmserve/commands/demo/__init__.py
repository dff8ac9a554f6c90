"""`vlmserve demo`: a page to chat with a served model about pictures and videos. Only `page` needs Gradio."""
